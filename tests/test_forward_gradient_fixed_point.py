"""Fixed point: bit for bit what 64-bit integers give, and weights that stay on their grid."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient import FixedPoint, ForwardGradient, integer
from lightning_npu.forward_gradient.directions import direction, key
from lightning_npu.forward_gradient.integer import Grid
from lightning_npu.forward_gradient.integer_weights import IntegerParameter, IntegerWeights
from lightning_npu.forward_gradient.weights import ProbedWeights


def grid(upper: int, *scales: float) -> Grid:
    scale = torch.tensor(scales, dtype=torch.float64)
    return Grid(scale.view(-1, 1) if len(scales) > 1 else scale.view(()), -upper, upper)


# ---- a reference in Python's own integers: no dtype, no overflow, no torch


def floor_shift(value: int, shift: int) -> int:
    return value // 2**shift


def nearest_shift(value: int, shift: int) -> int:
    return (value + 2**shift // 2) // 2**shift


def saturate(value: int, bound: int) -> int:
    return max(-bound, min(bound, value))


@given(
    weight=st.integers(-(2**24), 2**24),
    z=st.integers(-127, 127),
    eps=st.integers(0, 2**16),
    sign=st.sampled_from([1, -1]),
    z_shift=st.integers(0, 6),
    bound=st.sampled_from([127, 32767, 2**24]),
)
@settings(max_examples=400, deadline=None)
def test_probes_are_those_of_exact_integers(weight: int, z: int, eps: int, sign: int, z_shift: int, bound: int) -> None:
    weight = saturate(weight, bound)
    steps = integer.displacement(
        torch.tensor([z], dtype=torch.int8), torch.tensor([eps], dtype=torch.int32), sign=sign, z_shift=z_shift
    )
    assert steps.dtype == torch.int32
    moved = saturate(weight + steps.item(), bound)
    assert moved == saturate(nearest_shift(weight * 2**z_shift + sign * eps * z, z_shift), bound)


@given(
    gradient=st.integers(-(2**24), 2**24),
    step=st.floats(2.0**-60, 2.0**20),
    rounding=st.sampled_from(["nearest", "floor", "stochastic", "error_feedback"]),
    residual=st.integers(-128, 127),
    random=st.integers(0, 2**46 - 1),
)
@settings(max_examples=600, deadline=None)
def test_updates_are_those_of_exact_integers(
    gradient: int, step: float, rounding: str, residual: int, random: int
) -> None:
    factor, shift = integer.multiplier(torch.tensor(step, dtype=torch.float64))
    m, k = factor.item(), shift.item()
    assert 0 <= k <= 46
    assert m <= 2**15 or k == 0
    assert m * 2.0**-k == pytest.approx(step, rel=2**-14, abs=2.0**-47)
    steps, left = integer.update_steps(
        torch.tensor([gradient], dtype=torch.int32), factor, shift, rounding=rounding,
        random=torch.tensor([random]), residual=torch.tensor([residual], dtype=torch.int8),
    )  # fmt: skip
    product = gradient * m
    if rounding == "nearest":
        assert steps.item() == nearest_shift(product, k)
    elif rounding == "floor":
        assert steps.item() == floor_shift(product, k)
    elif rounding == "stochastic":
        assert steps.item() == floor_shift(product + random % 2**k, k)
    else:
        total = (nearest_shift(product, k - 8) if k >= 8 else product * 2 ** (8 - k)) + residual
        assert steps.item() == nearest_shift(total, 8)
        assert left is not None
        assert left.dtype == torch.int8
        assert left.item() == total - steps.item() * 256


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=30), st.sampled_from([8, 16]), st.integers(0, 3))
@settings(deadline=None)
def test_grids_hold_what_they_are_made_for(values: list[float], bits: int, headroom: int) -> None:
    tensor = torch.tensor(values)
    made = integer.grid_of(tensor, bits=bits, headroom=headroom)
    quantized = made.quantize(tensor)
    assert quantized.dtype == (torch.int8 if bits == 8 else torch.int16)
    assert (made.dequantize(quantized) - tensor).abs().max() <= made.scale * 0.501
    if tensor.abs().max() > 1e-30:
        assert quantized.abs().max() <= made.upper / 2**headroom + 1
    assert torch.equal(made.quantize(made.dequantize(quantized).float()), quantized)


def test_signs_need_no_multiplier_and_other_coefficients_eight_bits() -> None:
    assert integer.integer_coefficients([1 / 3, -1 / 3, 0.0]) == ([1, -1, 0], 1 / 3)
    whole, value = integer.integer_coefficients([0.5, -0.2, 0.1])
    assert whole == [127, -51, 25]
    assert value == 0.5 / 127
    assert integer.integer_coefficients([0.0, 0.0])[0] == [0, 0]


def test_stochastic_rounding_is_right_on_average_and_the_same_every_time() -> None:
    factor, shift = integer.multiplier(torch.tensor(0.3, dtype=torch.float64))
    shape = torch.Size([40_000])
    noise = integer.noise(shape, seed=1, step=2, index=3)
    assert torch.equal(noise, integer.noise(shape, seed=1, step=2, index=3))
    assert not torch.equal(noise, integer.noise(shape, seed=1, step=3, index=3))
    steps, _ = integer.update_steps(
        torch.ones(shape, dtype=torch.int32), factor, shift, rounding="stochastic", random=noise
    )
    assert set(steps.tolist()) == {0, 1}
    assert float(steps.double().mean()) == pytest.approx(0.3, abs=0.01)


def test_floor_drifts_upwards_and_nearest_does_not() -> None:
    """What an arithmetic shift does to updates that are zero on average."""
    factor, shift = integer.multiplier(torch.tensor(0.37, dtype=torch.float64))
    gradient = torch.arange(-500, 501, dtype=torch.int32)
    mean = {
        rounding: float(integer.update_steps(gradient, factor, shift, rounding=rounding)[0].double().mean())
        for rounding in ("floor", "nearest")
    }
    assert mean["floor"] == pytest.approx(-0.5, abs=0.05)
    assert mean["nearest"] == pytest.approx(0.0, abs=0.05)


# ---- the optimizer against the same steps in 64-bit integers


class Reference:
    """``ForwardGradient(fixed_point=...)`` once more, in numpy's 64-bit integers."""

    def __init__(self, weights: np.ndarray, scale: np.ndarray, options: FixedPoint, bound: int, seed: int) -> None:
        self.w, self.scale, self.options, self.bound, self.seed = weights.astype(np.int64), scale, options, bound, seed
        self.residual = np.zeros_like(self.w)
        self.steps = 0

    def z(self, probe: int, distribution: str) -> np.ndarray:
        drawn = direction(
            self.w.shape, seed=self.seed, step=self.steps, probe=probe, index=0, distribution=distribution
        ).numpy()
        limit = 2 ** (self.options.z_bits - 1) - 1
        return np.clip(np.rint(drawn * 2**self.options.z_shift), -limit, limit).astype(np.int64)

    def step(self, loss: Any, lr: float, eps: float, m: int, distribution: str) -> None:
        o, half = self.options, 2**self.options.z_shift // 2
        eps_q = np.maximum(np.rint(eps / self.scale).astype(np.int64), o.min_eps_steps)
        gradient = np.zeros_like(self.w)
        for probe in range(m):
            z = self.z(probe, distribution)
            ends = [
                np.clip((self.w * 2**o.z_shift + sign * eps_q * z + half) >> o.z_shift, -self.bound, self.bound)
                for sign in (1, -1)
            ]
            gradient += int(np.sign(loss(ends[0]) - loss(ends[1]))) * z
        if gradient.any():
            self.w = np.clip(self.w - self.rounded(gradient, lr / m), -self.bound, self.bound)
        self.steps += 1

    def rounded(self, gradient: np.ndarray, lr: float) -> np.ndarray:
        o = self.options
        step = lr * 2.0**-o.z_shift / self.scale
        k = np.clip(14 - np.floor(np.log2(step)), 0, 46).astype(np.int64)
        product = gradient * np.rint(step * 2.0**k).astype(np.int64)
        if o.rounding == "nearest":
            return (product + ((1 << k) >> 1)) >> k
        if o.rounding == "floor":
            return product >> k
        if o.rounding == "stochastic":
            stream = np.random.Philox(key=key(self.seed, self.steps, -1, 0))
            words = (stream.random_raw(gradient.size) >> np.uint64(18)).astype(np.int64).reshape(gradient.shape)
            return (product + words % (1 << k)) >> k
        fraction = o.residual_bits
        right = np.maximum(k - fraction, 0)
        total = ((product + ((1 << right) >> 1)) >> right << np.maximum(fraction - k, 0)) + self.residual
        steps = (total + (1 << fraction >> 1)) >> fraction
        self.residual = total - (steps << fraction)
        return steps


@pytest.mark.parametrize("bits", [8, 16, 20])
@pytest.mark.parametrize("rounding", ["nearest", "floor", "stochastic", "error_feedback"])
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_run_is_that_of_64_bit_integers(bits: int, rounding: str, distribution: str, per_channel: bool) -> None:
    bound = 2 ** (bits - 1) - 1
    generator = np.random.default_rng(0)
    scale = np.array([[0.01], [0.003], [0.02]]) if per_channel else np.array(0.01)
    scale = np.asarray(scale * 2.0 ** (8 - bits))
    start = generator.integers(-bound, bound + 1, (3, 40))
    target = generator.normal(0, 0.3, start.shape)

    def loss(weights: np.ndarray) -> float:
        return float(np.square(weights * scale - target).sum())

    options = FixedPoint(weight_bits=min(bits, 16), rounding=rounding)
    made = Grid(torch.from_numpy(scale), -bound, bound)
    parameter = IntegerParameter(torch.from_numpy(start).to(made.dtype), made)
    optimizer = ForwardGradient(
        [parameter], 0.01, eps=0.02, m=3, distribution=distribution, fixed_point=options, seed=5
    )
    reference = Reference(start, scale, options, bound, seed=5)
    for _ in range(25):
        optimizer.step(lambda: loss(parameter.numpy().astype(np.int64)))
        reference.step(loss, 0.01, 0.02, 3, distribution)
        assert np.array_equal(parameter.numpy(), reference.w)
    assert not np.array_equal(reference.w, start)
    if rounding == "error_feedback":
        assert optimizer.state[parameter]["residual"].dtype == torch.int8
        assert np.array_equal(optimizer.state[parameter]["residual"].numpy(), reference.residual)


@pytest.mark.parametrize("bits", [8, 16, 20])
@pytest.mark.parametrize("sam_rho", [0.0, 0.05])
def test_nothing_moves_before_it_is_noted(bits: int, sam_rho: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just before a move is noted: integers that are 32 bits wide already must not have moved either."""
    bound = 2 ** (bits - 1) - 1
    made = Grid(torch.tensor(0.01, dtype=torch.float64), -bound, bound)
    start = torch.arange(-20, 20).clamp(-bound, bound).to(made.dtype)
    noted = IntegerWeights._set_out
    for moment in itertools.count(1):
        parameter = IntegerParameter(start.clone(), made)
        optimizer = ForwardGradient([parameter], 0.0, eps=0.05, m=2, sam_rho=sam_rho, fixed_point=FixedPoint(16))
        left = [moment]

        def interrupted(self: IntegerWeights, *args: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            noted(self, *args)

        monkeypatch.setattr(IntegerWeights, "_set_out", interrupted)
        try:
            optimizer.step(lambda parameter=parameter: float(parameter.double().square().sum()))  # type: ignore[misc]
        except KeyboardInterrupt:
            assert torch.equal(parameter, start)
        else:
            break
    assert moment > 2 * 3


# ---- float parameters that hold the values of a grid


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.randn(6, 3, generator=torch.Generator().manual_seed(2))).argmax(1)


def loss_of(net: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(net(X), Y)


@pytest.mark.parametrize(
    ("fixed_point", "dtype"),
    [
        *((None, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((FixedPoint(8, headroom=0), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (FixedPoint(16), torch.float32),
    ],
)
@pytest.mark.parametrize("sam_rho", [0.0, 0.05])
def test_an_interrupt_at_any_moment_leaves_the_weights_as_they_were(
    fixed_point: FixedPoint | None, dtype: torch.dtype, sam_rho: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)
    optimizer = ForwardGradient(net.parameters(), 0.0, eps=0.05, m=2, sam_rho=sam_rho, fixed_point=fixed_point)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(net(X.to(dtype)).float(), Y)

    optimizer.step(loss)  # puts the weights on their grid
    before = copy.deepcopy(net.state_dict())
    drawn = ProbedWeights.random
    for moment in itertools.count(1):
        left = [moment]

        def interrupted(self: ProbedWeights, place: Any, probe: int, left: list[int] = left) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return drawn(self, place, probe)

        monkeypatch.setattr(ProbedWeights, "random", interrupted)
        try:
            optimizer.step(loss)
        except KeyboardInterrupt:
            stopped = True
        else:
            stopped = False
        for name, value in net.state_dict().items():
            if fixed_point is None and dtype == torch.float32:
                assert torch.allclose(value, before[name], rtol=0, atol=1e-6)
            else:
                assert torch.equal(value, before[name])
        net.load_state_dict(before)  # rounding must not add up from one moment to the next
        if not stopped:
            break
    assert moment > 4 * 2 * 3  # tensors, probes, moves of each


@pytest.mark.parametrize("fixed_point", [None, FixedPoint(8, headroom=0), FixedPoint(16)])
@pytest.mark.parametrize("sam_rho", [0.0, 0.05])
def test_an_interrupt_while_a_tensor_is_written_leaves_the_weights_as_they_were(
    fixed_point: FixedPoint | None, sam_rho: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises it when the write returns: the tensor has moved, and nothing was noted yet."""
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = ForwardGradient(net.parameters(), 0.0, eps=0.05, m=2, sam_rho=sam_rho, fixed_point=fixed_point)
    optimizer.step(lambda: loss_of(net))
    before = copy.deepcopy(net.state_dict())
    name = "add_" if fixed_point is None else "copy_"
    plain = getattr(Tensor, name)
    for moment in itertools.count(1):
        left = [moment]

        def interrupted(self: Tensor, *args: Any, left: list[int] = left, **kwargs: Any) -> Tensor:
            result = plain(self, *args, **kwargs)
            left[0] -= isinstance(self, nn.Parameter)
            if left[0] == 0:
                left[0] = -1
                raise KeyboardInterrupt
            return result

        stopped = False
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, name, interrupted)
            try:
                optimizer.step(lambda: loss_of(net))
            except KeyboardInterrupt:
                stopped = True
        for key_, value in net.state_dict().items():
            assert torch.allclose(value, before[key_], rtol=0, atol=0.0 if fixed_point else 1e-6)
        net.load_state_dict(before)
        if not stopped:
            break
    assert moment > 4 * 2 * 3


@given(
    exponent=st.floats(-20, 10),
    headroom=st.integers(0, 4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(deadline=None)
def test_narrow_floats_hold_every_value_of_an_8_bit_grid(exponent: float, headroom: int, dtype: torch.dtype) -> None:
    made = integer.grid_of(torch.tensor([2.0**exponent]), bits=8, headroom=headroom)
    whole = torch.arange(-127, 128, dtype=torch.int8)
    if float(made.scale) <= 2.0**-24 and dtype == torch.float16:  # its smallest number
        return
    assert torch.equal(made.quantize(made.dequantize(whole).to(dtype)), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grids_that_narrow_floats_cannot_hold_are_refused(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).to(dtype))
    with pytest.raises(InputError, match=rf"{dtype} cannot hold(.|\n)*weight_bits=8(.|\n)*float32"):
        ForwardGradient([parameter], 0.1, fixed_point=FixedPoint(16))
    later = nn.Linear(3, 2)
    optimizer = ForwardGradient(later.parameters(), 0.1, fixed_point=FixedPoint(16))
    later.to(dtype)
    with pytest.raises(InputError, match="cannot hold"):
        optimizer.step(lambda: 1.0)
    tiny = nn.Parameter(torch.tensor([1e-6], dtype=torch.float16))
    with pytest.raises(InputError, match=r"cannot hold(.|\n)*in steps of"):
        ForwardGradient([tiny], 0.1, eps=1e-7, fixed_point=FixedPoint(8)).step(lambda: 1.0)


def test_weights_outside_of_their_grid_are_not_cut_without_a_word() -> None:
    net = model()
    optimizer = ForwardGradient(net.parameters(), 0.01, eps=0.02, fixed_point=FixedPoint(8))
    optimizer.step(lambda: loss_of(net))
    start = copy.deepcopy(net.state_dict())
    for others in (10.0, torch.nan):
        net.load_state_dict({name: value * others for name, value in start.items()})
        with pytest.raises(InputError, match=r"outside of the grid(.|\n)*new ForwardGradient"):
            optimizer.step(lambda: loss_of(net))
    net.load_state_dict({name: value * 0.5 for name, value in start.items()})
    optimizer.step(lambda: loss_of(net))


@pytest.mark.parametrize("other", [None, FixedPoint(16), FixedPoint(8, headroom=2), FixedPoint(8, residual_bits=4)])
def test_states_of_other_integers_are_refused(other: FixedPoint | None) -> None:
    net = model()
    optimizer = ForwardGradient(net.parameters(), 0.01, eps=0.02, fixed_point=FixedPoint(8))
    optimizer.step(lambda: loss_of(net))
    unlike = ForwardGradient(net.parameters(), 0.01, fixed_point=other)
    for saved, loading in ((optimizer, unlike), (unlike, optimizer)):
        with pytest.raises(InputError, match=r"saved with other integers(.|\n)*options that it was saved with"):
            loading.load_state_dict(saved.state_dict())
    alike = ForwardGradient(net.parameters(), 0.01, fixed_point=FixedPoint(8, rounding="stochastic"))
    alike.load_state_dict(optimizer.state_dict())


def test_the_largest_values_are_trained_not_the_largest_integers() -> None:
    parameter = IntegerParameter(torch.tensor([[100, 90], [9, 8]], dtype=torch.int8), grid(127, 0.001, 1.0))
    optimizer = ForwardGradient([parameter], 0.1, density=0.5, fixed_point=FixedPoint(8))
    optimizer.step(lambda: 1.0)
    assert optimizer.state[parameter]["mask"].tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("sam_rho", [0.0, 0.05])
def test_probes_restore_weights_bit_for_bit(bits: int, sam_rho: float) -> None:
    net = model()
    optimizer = ForwardGradient(
        net.parameters(), 0.0, eps=0.02, sam_rho=sam_rho, fixed_point=FixedPoint(weight_bits=bits)
    )
    optimizer.step(lambda: loss_of(net))  # puts the weights on their grid
    before = copy.deepcopy(net.state_dict())
    seen = []
    for _ in range(5):
        optimizer.step(lambda: seen.append(net.weight.detach().clone()) or loss_of(net))  # type: ignore[func-returns-value]
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)
    assert not any(torch.equal(probe, before["weight"]) for probe in seen)


@pytest.mark.parametrize("bits", [8, 16])
def test_float_parameters_hold_values_of_the_grid(bits: int) -> None:
    net = model()
    nn.init.zeros_(net.bias)
    optimizer = ForwardGradient(
        net.parameters(), 0.05, eps=0.02, fixed_point=FixedPoint(weight_bits=bits, rounding="error_feedback")
    )
    for _ in range(10):
        optimizer.step(lambda: loss_of(net))
    for parameter in net.parameters():
        whole = parameter.detach().double() / optimizer.state[parameter]["scale"]
        assert (whole - whole.round()).abs().max() < 1e-3
        assert whole.round().abs().max() <= 2 ** (bits - 1) - 1
        assert set(optimizer.state[parameter]) == {"scale", "residual"}
    assert net.bias.abs().max() > 0


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_resumed_integer_runs_are_uninterrupted_runs(rounding: str, tmp_path: Path) -> None:
    options = FixedPoint(weight_bits=8, rounding=rounding)
    whole, part = model(), model()
    optimizer = ForwardGradient(whole.parameters(), 0.05, eps=0.02, density=0.5, fixed_point=options)
    losses = [float(optimizer.step(lambda: loss_of(whole))) for _ in range(20)]
    first = ForwardGradient(part.parameters(), 0.05, eps=0.02, density=0.5, fixed_point=options)
    for _ in range(9):
        first.step(lambda: loss_of(part))
    torch.save({"net": part.state_dict(), "optimizer": first.state_dict()}, tmp_path / "s.pt")
    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    other = nn.Linear(6, 3)
    other.load_state_dict(saved["net"])
    second = ForwardGradient(other.parameters(), 0.05, eps=0.02, density=0.5, fixed_point=options)
    second.load_state_dict(saved["optimizer"])
    if rounding == "error_feedback":
        assert second.state[other.weight]["residual"].dtype == torch.int8
    assert second.state[other.weight]["mask"].dtype == torch.bool
    assert [float(second.step(lambda: loss_of(other))) for _ in range(11)] == losses[9:]
    assert torch.equal(other.weight, whole.weight)


@pytest.mark.parametrize("rounding", ["nearest", "floor", "stochastic", "error_feedback"])
def test_masked_integer_weights_do_not_move(rounding: str) -> None:
    net = model()
    optimizer = ForwardGradient(
        [net.weight], 0.2, eps=0.02, density=0.25, fixed_point=FixedPoint(weight_bits=8, rounding=rounding)
    )
    optimizer.step(lambda: loss_of(net))
    scale, mask = optimizer.state[net.weight]["scale"], optimizer.state[net.weight]["mask"]
    start = (net.weight.detach().double() / scale).round()
    for _ in range(5):
        optimizer.step(lambda: loss_of(net))
    changed = (net.weight.detach().double() / scale).round() != start
    assert changed.any()
    assert not changed[~mask].any()


def test_the_published_eps_perturbs_nothing_in_8_bits() -> None:
    """66 steps of a 16-bit grid, none of an 8-bit one: why the published recipe does not train 8-bit weights."""
    weights = torch.tensor([0.5, -0.5])
    steps = {
        bits: int(integer.eps_steps(1e-3, integer.grid_of(weights, bits=bits, headroom=0), least=0)) for bits in (8, 16)
    }
    assert steps == {8: 0, 16: 66}
    literal = FixedPoint(weight_bits=8, min_eps_steps=0, headroom=0)
    net = model()
    optimizer = ForwardGradient(net.parameters(), 0.05, eps=1e-3, fixed_point=literal)
    optimizer.step(lambda: loss_of(net))
    before = copy.deepcopy(net.state_dict())
    for _ in range(20):
        optimizer.step(lambda: loss_of(net))
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)


def test_in_8_bits_error_feedback_trains_where_rounding_stands_still() -> None:
    def loss(rounding: str) -> float:
        net = model()
        optimizer = ForwardGradient(
            net.parameters(), 1e-3, eps=0.02, fixed_point=FixedPoint(weight_bits=8, rounding=rounding)
        )
        for _ in range(900):
            optimizer.step(lambda: loss_of(net))
        return loss_of(net).item()

    start = loss_of(model()).item()
    assert loss("nearest") > 0.97 * start
    assert loss("error_feedback") < 0.8 * start


def test_integer_parameters_are_copied_and_pickled_with_their_grid() -> None:
    made = grid(127, 0.5, 0.25)
    parameter = IntegerParameter(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), made)
    holder = nn.Module()
    holder.weight = parameter
    for other in (copy.deepcopy(holder).weight, pickle.loads(pickle.dumps(parameter)), holder.to("cpu").weight):
        assert isinstance(other, IntegerParameter)
        assert torch.equal(other, parameter)
        assert torch.equal(other.grid.scale, made.scale)
        assert not other.requires_grad
    assert list(holder.state_dict()) == ["weight"]
    assert holder.float().weight.dtype == torch.int8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_bits": 4}, "weight_bits is wrong"),
        ({"rounding": "up"}, "rounding is wrong"),
        ({"z_bits": 9}, "z_bits is wrong"),
        ({"z_bits": 4}, "saturate below 1"),
        ({"headroom": -1}, "headroom is wrong"),
        ({"residual_bits": 0}, "residual_bits is wrong"),
        ({"min_eps_steps": True}, "min_eps_steps is wrong"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        FixedPoint(**options)


def test_what_integers_cannot_do_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4))
    fixed = FixedPoint()
    for options, words in (
        ({"estimator": "projected"}, "no static range"),
        ({"momentum": 0.9}, "float buffer per weight"),
        ({"guide": {"beta": 0.5, "alpha": 0.5}}, "float buffer per weight"),
    ):
        with pytest.raises(InputError, match=words):
            ForwardGradient([parameter], 0.1, fixed_point=fixed, **options)  # type: ignore[arg-type]
    whole = IntegerParameter(torch.zeros(3, dtype=torch.int8), grid(127, 0.1))
    with pytest.raises(InputError, match=r"trained in integers(.|\n)*error_feedback"):
        ForwardGradient([whole], 0.1)
    with pytest.raises(InputError, match="holds integers"):
        IntegerParameter(torch.zeros(3), grid(127, 0.1))
    with pytest.raises(InputError, match="cannot be trained"):
        ForwardGradient([torch.zeros(3, dtype=torch.int8)], 0.1, fixed_point=fixed)
    with pytest.raises(InputError, match="eps is wider than the weights' grid"):
        ForwardGradient([parameter], 0.1, eps=50.0, fixed_point=fixed).step(lambda: parameter.sum())
    with pytest.raises(InputError, match="more than their whole grid"):
        ForwardGradient([parameter], 1e9, fixed_point=fixed).step(lambda: parameter.sum())
    with pytest.raises(InputError, match="not finite have no grid"):
        ForwardGradient([nn.Parameter(torch.full((2,), torch.nan))], 0.1, fixed_point=fixed).step(lambda: 1.0)
