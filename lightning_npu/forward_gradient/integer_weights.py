"""Probing integer weights: parameters that are integers, and float parameters that hold the values of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient import integer
from lightning_npu.forward_gradient.estimators import coefficients
from lightning_npu.forward_gradient.fixed_point import FixedPoint
from lightning_npu.forward_gradient.integer import Grid
from lightning_npu.forward_gradient.weights import NARROW, Place, ProbedWeights, Recipe


class IntegerParameter(nn.Parameter):
    """A parameter of integers that knows what they stand for; never requires grad.

    Args:
        data: int8, int16 or int32, within the grid's bounds.
        grid: what the integers stand for.
    """

    grid: Grid

    def __new__(cls, data: Tensor, grid: Grid) -> IntegerParameter:
        """Make a parameter that shares ``data``."""
        if data.dtype not in (torch.int8, torch.int16, torch.int32):
            raise InputError(
                "An integer parameter holds integers.", expected="int8, int16 or int32", got=str(data.dtype)
            )
        made: IntegerParameter = torch.Tensor._make_subclass(cls, data, False)
        made.grid = grid
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> IntegerParameter:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data.clone(memory_format=torch.preserve_format), self.grid)
        copied: IntegerParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.data, self.grid)


@dataclass(frozen=True)
class _Move:
    """A tensor's move to one end of a probe.

    Attributes:
        probe: number of the direction.
        sign: +1 or -1 along it.
        distance: as a float; ``eps`` or the length of an ascent.
        cut: positions that saturated, and what they held before; None where none did.
    """

    probe: int
    sign: int
    distance: float
    cut: tuple[Tensor, Tensor] | None


def require_trainable(parameter: Tensor, fixed_point: FixedPoint | None) -> None:
    """Refuse parameters of a dtype that the optimizer cannot train.

    Raises:
        InputError: integers without ``fixed_point``, complex numbers, or floats too narrow for a grid of 16 bits.
    """
    if isinstance(parameter, IntegerParameter):
        if fixed_point is None:
            raise InputError(
                "Integer parameters are trained in integers.",
                expected="fixed_point=FixedPoint(...)",
                got="fixed_point=None",
                remedy="pass fixed_point=FixedPoint(weight_bits=8, rounding='error_feedback')",
            )
    elif not parameter.is_floating_point():
        raise InputError(
            "A parameter is of a dtype that cannot be trained.",
            expected="a floating dtype, or a parameter of GraphWeights",
            got=str(parameter.dtype),
        )
    elif fixed_point is not None and fixed_point.weight_bits == 16:
        _require_held(Grid(torch.ones((), dtype=torch.float64), -fixed_point.largest, fixed_point.largest), parameter)


def _require_held(grid: Grid, parameter: Tensor) -> None:
    """Refuse a grid of whose values the parameter's dtype would lose some, or take them for others."""
    dtype = parameter.dtype
    if dtype not in NARROW:
        return
    whole = torch.arange(grid.lower, grid.upper + 1)
    held = grid.dequantize(whole).to(dtype)
    if not bool(torch.isfinite(held).all()) or not torch.equal(grid.quantize(held).long(), whole):
        raise InputError(
            f"Parameters of {dtype} cannot hold the values of their integer grid.",
            expected="float32 parameters, or weight_bits=8 and weights within the range of the dtype",
            got=f"integers up to {grid.upper} in steps of {float(grid.scale):.3g}",
            remedy="keep these parameters in float32, or pass FixedPoint(weight_bits=8)",
        )


def _require_within(grid: Grid, values: Tensor) -> None:
    if values.numel() == 0:
        return
    most = max(abs(float(end)) for end in values.detach().aminmax())
    bound = (grid.upper + 0.5) * float(grid.scale)
    if not most <= bound:
        raise InputError(
            "Weights lie outside of the grid that the first step gave them: others were loaded since, or set.",
            expected=f"finite weights up to {bound:.3g}",
            got=f"{most:.3g}",
            remedy="make a new ForwardGradient after loading other weights",
        )


class IntegerWeights(ProbedWeights):
    """Moves integers in place and takes the very same steps back, so that no copy of the weights is kept.

    What saturated on the way out is noted, and all come back bit for bit.
    """

    def __init__(self, places: Sequence[Place], recipe: Recipe, seed: int, step: int, fixed_point: FixedPoint) -> None:
        super().__init__(places, recipe, seed, step)
        self.options = fixed_point
        self.grids = {place.index: self._grid(place) for place in places}
        self._moves: dict[int, list[_Move]] = {place.index: [] for place in places}
        self._under_way: tuple[Place, Tensor, list[_Move]] | None = None
        self._eps: dict[tuple[int, float], Tensor] = {}
        self._ascents = 0

    def perturb(self, probe: int, sign: int) -> None:
        """Move there, from the same probe's other end in one go."""
        for place in self.places:
            self._go(place, probe, sign, float(place.group["eps"]))

    def restore(self) -> None:
        """Move back to where the probes start."""
        for place in self.places:
            self._back(place, self._ascents)

    def ascend(self, probe: int, sign: int, distance: float) -> None:
        """Move along ``probe`` and let the probes start there."""
        if sign:
            self._ascents = 1
            for place in self.places:
                self._go(place, probe, sign, distance)

    def return_home(self) -> None:
        """Undo probe and ascent."""
        self._ascents = 0
        self._arrive()
        for place in self.places:
            self._back(place, 0)

    def values(self, place: Place) -> Tensor:
        """Scales differ between channels, so integers do not tell which weights are the largest."""
        return self.grids[place.index].dequantize(self._integers(place).as_subclass(Tensor))

    def update(self, differences: Sequence[float], estimator: str) -> None:
        """One multiplication, shift, rounding and saturation per weight."""
        for place in self.places:
            weights = self._integers(place)
            directions = [self._direction(place, probe) for probe in range(len(differences))]
            plain = coefficients(differences, estimator=estimator, eps=float(place.group["eps"]))
            if self.recipe.kernel_norm:
                plain = self._kernel_normed(place, plain, directions)
            whole, value = integer.integer_coefficients(plain)
            gradient = torch.zeros(weights.shape, dtype=torch.int32, device=weights.device)
            for factor, drawn in zip(whole, directions, strict=True):
                gradient.add_(drawn.to(torch.int32), alpha=factor)
            steps = self._steps(place, gradient, value)
            mask = self.mask(place)
            if mask is not None:
                steps = steps * mask  # rounding must not move what is not trained
            self._write(place, integer.apply_steps(weights, steps, self.grids[place.index]))

    def _steps(self, place: Place, gradient: Tensor, value: float) -> Tensor:
        options, grid = self.options, self.grids[place.index]
        per_step = float(place.group["lr"]) * value * 2.0**-options.z_shift / grid.scale
        factor, shift = (part.to(gradient.device) for part in integer.multiplier(per_step))
        random = residual = None
        if options.rounding == "stochastic":
            random = integer.noise(gradient.shape, seed=self.seed, step=self.step, index=place.index)
            random = random.to(gradient.device)
        if options.rounding == "error_feedback":
            dtype = integer.residual_dtype(options.residual_bits)
            residual = place.state.get("residual")
            residual = torch.zeros_like(gradient, dtype=dtype) if residual is None else residual
        steps, left = integer.update_steps(
            gradient, factor, shift,
            rounding=options.rounding, random=random, residual=residual, residual_bits=options.residual_bits,
        )  # fmt: skip
        if left is not None:
            place.state["residual"] = left
        return steps

    def _kernel_normed(self, place: Place, plain: list[float], directions: Sequence[Tensor]) -> list[float]:
        size = float(self.values(place).norm())
        scale = 2.0**-self.options.z_shift
        return [
            weight * self.relative(place, size, scale * float(drawn.double().norm()))
            for weight, drawn in zip(plain, directions, strict=True)
        ]

    def _go(self, place: Place, probe: int, sign: int, distance: float) -> None:
        z = self._direction(place, probe)
        weights, moves = self._integers(place), self._moves[place.index]
        turns = len(moves) > self._ascents and moves[-1].probe == probe
        if turns:
            weights = self._without(place, weights, moves[-1], z)
        elif len(moves) > self._ascents:
            self._back(place, self._ascents)
            weights, moves = self._integers(place), self._moves[place.index]
        grid = self.grids[place.index]
        far = weights.to(torch.int32, copy=True).add_(self._displacement(place, sign, distance, z))
        cut = None
        if far.numel() and not (grid.lower <= int(far.min()) and int(far.max()) <= grid.upper):
            outside = ((far < grid.lower) | (far > grid.upper)).flatten().nonzero().flatten()
            cut = (outside, weights.take(outside))
            far.clamp_(grid.lower, grid.upper)
        kept = moves[:-1] if turns else moves
        self._set_out(place, far.to(weights.dtype), [*kept, _Move(probe, sign, distance, cut)])

    def _back(self, place: Place, moves: int) -> None:
        """Undo all but so many moves."""
        while len(done := self._moves[place.index]) > moves:
            z = self._direction(place, done[-1].probe)
            self._set_out(place, self._without(place, self._integers(place), done[-1], z), done[:-1])

    def _set_out(self, place: Place, weights: Tensor, moves: list[_Move]) -> None:
        """Write ``weights``, which are so many moves from home; Ctrl-C may come in the middle."""
        self._under_way = (place, weights, moves)
        self._arrive()

    def _arrive(self) -> None:
        """Finish what was begun: writing twice does no harm."""
        if self._under_way is not None:
            place, weights, moves = self._under_way
            self._write(place, weights)
            self._moves[place.index] = moves
            self._under_way = None

    def _without(self, place: Place, weights: Tensor, move: _Move, z: Tensor) -> Tensor:
        """The weights as they were before ``move`` along ``z``."""
        steps = self._displacement(place, move.sign, move.distance, z)
        before = weights.to(torch.int32, copy=True).sub_(steps).to(weights.dtype)  # biases are int32 as they are
        return before if move.cut is None else before.put_(*move.cut)

    def _displacement(self, place: Place, sign: int, distance: float, z: Tensor) -> Tensor:
        eps = self._eps.get((place.index, distance))
        if eps is None:
            eps = integer.eps_steps(distance, self.grids[place.index], least=self.options.min_eps_steps).to(z.device)
            self._eps[place.index, distance] = eps
        return integer.displacement(z, eps, sign=sign, z_shift=self.options.z_shift)

    def _direction(self, place: Place, probe: int) -> Tensor:
        options = self.options
        z = integer.quantize_direction(self.random(place, probe), z_shift=options.z_shift, largest=options.z_largest)
        mask = self.mask(place)
        return z if mask is None else z * mask

    def _grid(self, place: Place) -> Grid:
        if isinstance(place.parameter, IntegerParameter):
            return place.parameter.grid
        if "scale" in place.state:
            largest = self.options.largest
            grid = Grid(torch.tensor(place.state["scale"], dtype=torch.float64), -largest, largest)
            _require_within(grid, place.parameter)
            return grid
        grid = integer.grid_of(place.parameter, bits=self.options.weight_bits, headroom=self.options.headroom)
        _require_held(grid, place.parameter)
        place.state["scale"] = float(grid.scale)
        return grid

    def _integers(self, place: Place) -> Tensor:
        """The tensor's integers as they are now."""
        parameter = place.parameter.detach()
        return (
            parameter if isinstance(place.parameter, IntegerParameter) else self.grids[place.index].quantize(parameter)
        )

    def _write(self, place: Place, weights: Tensor) -> None:
        if isinstance(place.parameter, IntegerParameter):
            place.parameter.copy_(weights)
        else:
            place.parameter.copy_(self.grids[place.index].dequantize(weights))
