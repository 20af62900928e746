"""ForwardGradient in float: probes leave no trace, steps go downhill, runs resume bit for bit."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient import ForwardGradient
from lightning_npu.forward_gradient.estimators import coefficients

TARGET = torch.linspace(-1, 1, 12)


def quadratic(parameter: Tensor) -> Tensor:
    return (parameter - TARGET).square().sum()


def net(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))


def batch(number: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(number))
    return x, (x[:, 0] > 0).long()


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x), y)


def run(model: nn.Module, optimizer: ForwardGradient, steps: range) -> list[float]:
    return [float(optimizer.step(lambda n=n: loss_of(model, n))) for n in steps]  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "sign"},
        {"estimator": "projected", "lr": 0.03},
        {"estimator": "normalized"},
        {"distribution": "rademacher"},
        {"momentum": 0.5},
        {"guide": {"beta": 0.8, "alpha": 0.5}},
        {"kernel_norm": True, "lr": 0.2},
        {"sam_rho": 0.01},
        {"density": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_it_goes_downhill(options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.full((2, 12), 0.5))
    optimizer = ForwardGradient([parameter], **{"lr": 0.05, "m": 4, **options})
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 200)
    start = quadratic(parameter).item()
    for _ in range(200):
        optimizer.step(lambda: quadratic(parameter))
        schedule.step()
    # with half of the weights, only their half of the loss can go
    assert quadratic(parameter).item() < start * (0.75 if "density" in options else 0.1)
    assert parameter.grad is None


@pytest.mark.parametrize("sam_rho", [0.0, 0.1])
def test_probes_leave_the_weights_where_they_were(sam_rho: float) -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    run(model, ForwardGradient(model.parameters(), 0.0, eps=1e-2, sam_rho=sam_rho), range(20))
    for now, then in zip(model.parameters(), before, strict=True):
        assert (now - then).abs().max() < 1e-6


def test_a_closure_that_fails_leaves_the_weights_where_they_were() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ForwardGradient(model.parameters(), 0.1, sam_rho=0.1)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return loss_of(model)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert not optimizer.probing
    for now, then in zip(model.parameters(), before, strict=True):
        assert (now - then).abs().max() < 1e-6


def test_half_precision_weights_come_back_bit_for_bit() -> None:
    parameter = nn.Parameter(torch.randn(64).bfloat16())
    before = parameter.detach().clone()
    ForwardGradient([parameter], 0.0, eps=1e-2).step(lambda: parameter.float().square().sum())
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(("options", "calls"), [({}, 6), ({"m": 5}, 10), ({"sam_rho": 0.1}, 8), ({"m": 1}, 2)])
def test_calls_per_step(options: dict[str, Any], calls: int) -> None:
    model = net()
    seen: list[bool] = []

    def closure() -> Tensor:
        loss = loss_of(model)
        seen.append(loss.requires_grad)
        return loss

    optimizer = ForwardGradient(model.parameters(), 0.01, **options)
    loss = optimizer.step(closure)
    assert seen == [False] * calls
    assert optimizer.calls == calls
    assert not loss.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state_dict()["state"]


def test_the_returned_loss_is_the_mean_over_the_probes() -> None:
    parameter = nn.Parameter(torch.ones(12))
    seen: list[float] = []

    def closure() -> Tensor:
        seen.append(quadratic(parameter).item())
        return quadratic(parameter)

    loss = ForwardGradient([parameter], 0.01).step(closure)
    assert float(loss) == pytest.approx(sum(seen) / 6, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"guide": {"beta": 0.5, "alpha": 0.5}}, {"density": 0.3}])
def test_resumed_runs_are_uninterrupted_runs(options: dict[str, Any], tmp_path: Path) -> None:
    whole, part = net(), net()
    optimizer = ForwardGradient(whole.parameters(), 0.02, seed=3, **options)
    losses = run(whole, optimizer, range(12))

    first = ForwardGradient(part.parameters(), 0.02, seed=3, **options)
    assert run(part, first, range(5)) == losses[:5]
    torch.save({"model": part.state_dict(), "optimizer": first.state_dict()}, tmp_path / "half.pt")
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    torch.manual_seed(99)  # another process: other random numbers, other initial weights
    resumed = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    resumed.load_state_dict(saved["model"])
    second = ForwardGradient(resumed.parameters(), 0.5, seed=8, **options)
    second.load_state_dict(saved["optimizer"])
    assert run(resumed, second, range(5, 12)) == losses[5:]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_seeds_make_trajectories() -> None:
    def losses(seed: int) -> list[float]:
        model = net()
        return run(model, ForwardGradient(model.parameters(), 0.02, seed=seed), range(6))

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_dropout_masks_are_equal_within_a_step_and_differ_between_steps() -> None:
    dropout, masks = nn.Dropout(0.5), []
    parameter = nn.Parameter(torch.ones(3))

    def closure() -> Tensor:
        masks.append(dropout(torch.ones(64)))
        return parameter.sum()

    optimizer = ForwardGradient([parameter], 0.1)
    optimizer.step(closure)
    optimizer.step(closure)
    assert all(torch.equal(mask, masks[0]) for mask in masks[:6])
    assert not torch.equal(masks[0], masks[6])


def test_the_users_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    model = net()
    torch.manual_seed(5)
    ForwardGradient(model.parameters(), 0.1).step(lambda: loss_of(model))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_costs_the_step_and_is_counted(value: float) -> None:
    parameter = nn.Parameter(torch.ones(3))
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        return parameter.sum() * (value if calls == 4 else 1.0)

    optimizer = ForwardGradient([parameter], 0.1)
    optimizer.step(closure)
    assert optimizer.skipped == 1
    assert (parameter - 1).abs().max() < 1e-6
    optimizer.step(closure)
    assert (optimizer.skipped, optimizer.steps) == (1, 2)
    assert (parameter - 1).abs().max() > 1e-3


@pytest.mark.parametrize("closure", [None, 3])
def test_a_step_needs_a_closure(closure: Any) -> None:
    optimizer = ForwardGradient([nn.Parameter(torch.ones(3))], 0.1)
    with pytest.raises(InputError, match=r"needs a closure(.|\n)*optimizer.step\(lambda"):
        optimizer.step(closure)


@pytest.mark.parametrize("result", [None, "loss", torch.ones(2)])
def test_the_closure_must_return_one_number(result: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match="must return the loss"):
        ForwardGradient([parameter], 0.1).step(lambda: result)
    assert (parameter - 1).abs().max() < 1e-6


def test_a_closure_with_backward_is_told_so() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def closure() -> Tensor:
        loss = parameter.sum()
        loss.backward()
        return loss

    with pytest.raises(InputError, match=r"calls backward\(\)(.|\n)*remove backward"):
        ForwardGradient([parameter], 0.1).step(closure)


def test_gradients_that_a_closure_insists_on_are_dropped_with_a_warning() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def closure() -> Tensor:
        with torch.enable_grad():
            loss = parameter.sum()
            loss.backward()
        return loss

    with pytest.warns(UserWarning, match="computed gradients while ForwardGradient probed"):
        ForwardGradient([parameter], 0.1).step(closure)
    assert parameter.grad is None


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_running_statistics_are_protected(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.Linear(4, 2))
    x = torch.randn(8, 4) if isinstance(norm, nn.BatchNorm1d) else torch.randn(8, 4, 4)
    optimizer = ForwardGradient(model.parameters(), 0.01)
    mean = norm.running_mean.clone()
    with pytest.raises(InputError, match=r"Norm1d in train mode(.|\n)*m.eval\(\)"):
        optimizer.step(lambda: model(x).square().mean())
    assert torch.equal(norm.running_mean, mean)
    norm.eval()
    optimizer.step(lambda: model(x).square().mean())
    assert torch.equal(norm.running_mean, mean)


def test_hybrid_trains_the_head_with_true_gradients() -> None:
    model = net(dropout=0.0)
    head = list(model[3].parameters())
    with_graph: list[bool] = []

    def closure() -> Tensor:
        loss = loss_of(model)
        with_graph.append(loss.requires_grad)
        return loss

    first_order = torch.optim.SGD(head, lr=0.1)
    expected = [h - 0.1 * g for h, g in zip(head, torch.autograd.grad(loss_of(model), head), strict=True)]
    optimizer = ForwardGradient(model[0].parameters(), 0.0, first_order=first_order)
    optimizer.step(closure)
    assert with_graph == [False] * 6 + [True]
    assert optimizer.calls == 7
    for parameter, value in zip(head, expected, strict=True):
        assert torch.allclose(parameter, value, atol=1e-6)
    assert all(p.grad is None and p.requires_grad for p in model[0].parameters())


def test_hybrid_takes_closures_that_call_backward() -> None:
    model = net()
    optimizer = ForwardGradient(model[0].parameters(), 0.01, first_order=torch.optim.SGD(model[3].parameters(), lr=0.1))

    def closure() -> Tensor:
        loss = loss_of(model)
        if loss.requires_grad:
            loss.backward()
        return loss

    before = model[3].weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(model[3].weight, before)


def test_hybrid_saves_both_and_refuses_what_is_no_hybrid() -> None:
    model = net()

    def make() -> ForwardGradient:
        return ForwardGradient(model[0].parameters(), 0.01, first_order=torch.optim.Adam(model[3].parameters(), lr=0.1))

    optimizer = make()
    run(model, optimizer, range(2))
    other = make()
    other.load_state_dict(optimizer.state_dict())
    assert other.first_order is not None
    assert other.first_order.state_dict()["state"][0]["step"] == 2
    with pytest.raises(InputError, match="not the state of a ForwardGradient like this one"):
        ForwardGradient(model[0].parameters(), 0.01).load_state_dict(optimizer.state_dict())
    with pytest.raises(InputError, match="not the state"):
        other.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(InputError, match=r"trains too(.|\n)*4 in both"):
        ForwardGradient(model.parameters(), 0.01, first_order=torch.optim.SGD(model.parameters(), lr=0.1))
    apart = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(InputError, match="No gradient reached"):
        ForwardGradient(model.parameters(), 0.01, first_order=apart).step(lambda: loss_of(model))


def test_groups_have_their_own_rates_and_schedulers_work() -> None:
    a, b = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))
    optimizer = ForwardGradient([{"params": [a]}, {"params": [b], "lr": 0.0, "eps": 0.1}], 0.5, m=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step(lambda: a.sum() + b.sum())
    moved = float((a.detach() - 1).abs().mean())
    assert (b - 1).detach().abs().max() < 1e-6
    scheduler.step()
    before = a.detach().clone()
    optimizer.step(lambda: a.sum() + b.sum())
    assert float((a.detach() - before).abs().mean()) == pytest.approx(moved / 10, rel=0.5)


def test_a_mask_trains_the_largest_weights_only() -> None:
    weight = nn.Parameter(torch.arange(1.0, 101.0).view(10, 10))
    before = weight.detach().clone()
    optimizer = ForwardGradient([weight], 0.1, density=0.1)
    for _ in range(3):
        optimizer.step(lambda: weight.sum())
    changed = (weight - before).abs() > 1e-4
    assert changed.flatten()[-10:].all()
    assert not changed.flatten()[:-10].any()


def test_guided_directions_lean_on_what_went_before_and_keep_their_size() -> None:
    parameter = nn.Parameter(torch.zeros(20_000))
    optimizer = ForwardGradient([parameter], 0.0, eps=1.0, m=1, guide={"beta": 0.3, "alpha": 0.5})
    seen: list[Tensor] = []

    def closure() -> Tensor:
        seen.append(parameter.detach().clone())
        return parameter.sum()

    optimizer.step(closure)
    guide = optimizer.state[parameter]["guide"]
    assert float(guide.square().mean()) == pytest.approx(1.0, rel=1e-3)
    optimizer.step(closure)
    drawn = seen[2]
    assert float(drawn.var()) == pytest.approx(1.0, rel=0.05)
    # 0.7 / sqrt(0.3**2 * 0.5 + 0.7**2 * 0.5 + 0.7**2)
    assert float((drawn * guide).mean()) == pytest.approx(0.7926, rel=0.05)


def test_it_survives_copies_and_pickles() -> None:
    model = net()
    optimizer = ForwardGradient(model.parameters(), 0.02, m=2, estimator="normalized", seed=4, ddp="directions")
    run(model, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.m, other.estimator, other.seed, other.steps, other.ddp) == (2, "normalized", 4, 2, "directions")


def test_copies_of_an_optimizer_with_a_scheduler_train_their_own_weights() -> None:
    model = net()
    optimizer = ForwardGradient(model.parameters(), 0.02)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the instance
    optimizer.register_step_post_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    pickle.loads(pickle.dumps(optimizer))
    other, copied = copy.deepcopy((model, optimizer))
    run(other, copied, range(2))
    assert (optimizer.steps, copied.steps) == (0, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"lr": -1}, "lr is wrong"),
        ({"lr": math.nan}, "lr is wrong"),
        ({"eps": 0.0}, "eps is wrong"),
        ({"eps": -1e-3}, "eps is wrong"),
        ({"m": 50}, r"whole optimizer(.|\n)*'lr', 'eps'(.|\n)*\['m'\]"),
        ({"estimator": "sign", "density": 0.5}, r"\['density', 'estimator'\](.|\n)*one ForwardGradient for each"),
    ],
)
def test_wrong_options_of_groups_are_named(group: dict[str, Any], words: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(InputError, match=words):
        ForwardGradient([{"params": [parameter], **group}], 0.1)
    optimizer = ForwardGradient([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(InputError, match=words):
        optimizer.add_param_group({"params": [parameter], **group})
    assert len(optimizer.param_groups) == 1


def test_what_schedulers_and_users_note_in_groups_is_left_alone() -> None:
    group = {"params": [nn.Parameter(torch.ones(2))], "initial_lr": 0.1, "name": "body", "max_lr": 1.0}
    optimizer = ForwardGradient([group], 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5, cycle_momentum=False)
    optimizer.step(lambda: 1.0)
    schedule.step()
    assert optimizer.param_groups[0]["name"] == "body"


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
@pytest.mark.parametrize("options", [{}, {"density": 0.3}, {"guide": {"beta": 0.5, "alpha": 0.5}}, {"sam_rho": 0.01}])
def test_tensors_without_elements_do_no_harm(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ForwardGradient([nn.Parameter(torch.zeros(shape)), parameter], 0.1, **options)
    optimizer.step(lambda: parameter.sum())
    assert not torch.equal(parameter, torch.ones(3))


@pytest.mark.parametrize("failing", ["exception", "nan"])
def test_a_failing_call_for_first_order_changes_nothing(failing: str) -> None:
    model = net(dropout=0.0)
    first_order = torch.optim.Adam(model[3].parameters(), lr=0.1)
    optimizer = ForwardGradient(model[0].parameters(), 0.1, first_order=first_order)
    before = copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        loss = loss_of(model)
        if loss.requires_grad and failing == "exception":
            raise OSError("no more data")
        return loss * math.nan if loss.requires_grad else loss

    if failing == "exception":
        with pytest.raises(OSError, match="no more data"):
            optimizer.step(closure)
        assert (optimizer.steps, optimizer.skipped) == (0, 0)
    else:
        optimizer.step(closure)
        assert (optimizer.steps, optimizer.skipped) == (1, 1)
    assert not first_order.state
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.allclose(value, before[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1}, "lr is wrong"),
        ({"eps": 0}, "eps is wrong"),
        ({"m": 0}, "m is wrong"),
        ({"m": 1.5}, "m is wrong"),
        ({"momentum": 1.0}, "momentum is wrong"),
        ({"density": 0}, "density is wrong"),
        ({"sam_rho": math.nan}, "sam_rho is wrong"),
        ({"seed": "a"}, "seed is wrong"),
        ({"ddp": "sum"}, "ddp is wrong"),
        ({"estimator": "mean"}, "estimator is wrong"),
        ({"distribution": "uniform"}, "distribution is wrong"),
        ({"guide": {"beta": 0.5}}, "guide is wrong"),
        ({"guide": {"beta": 0.5, "alpha": 0.5}, "distribution": "rademacher"}, "Guided directions"),
        ({"fixed_point": 8}, "fixed_point is wrong"),
        ({"first_order": "adam"}, "first_order is wrong"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ForwardGradient([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.floats(1e-4, 1.0))
@settings(deadline=None)
def test_estimators(differences: list[float], eps: float) -> None:
    count = len(differences)
    signs = coefficients(differences, estimator="sign", eps=eps)
    assert [round(c * count) for c in signs] == [(d > 0) - (d < 0) for d in differences]
    slopes = coefficients(differences, estimator="projected", eps=eps)
    assert all(c * count * 2 * eps == pytest.approx(d, abs=1e-9) for c, d in zip(slopes, differences, strict=True))
    normal = coefficients(differences, estimator="normalized", eps=eps)
    if any(abs(d) > 1e-100 for d in differences):
        assert sum((c * count) ** 2 for c in normal) == pytest.approx(count)
    else:
        assert all(abs(c) <= 1 for c in normal)
