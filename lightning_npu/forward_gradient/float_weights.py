"""Probing float weights: in place and from seeds, so that no copy of a direction or of the weights is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_npu.forward_gradient.estimators import coefficients
from lightning_npu.forward_gradient.weights import NARROW, Place, ProbedWeights, Recipe


class FloatWeights(ProbedWeights):
    """Adds and subtracts directions in place; float32 comes back to within its rounding.

    Narrower weights would not: of them a copy is kept for the length of the step.

    Args:
        places: the tensors.
        recipe: options.
        seed: of the directions.
        step: number of the step.
        exact: keep a copy of all: where ranks take different probes, their roundings would differ.
    """

    def __init__(self, places: Sequence[Place], recipe: Recipe, seed: int, step: int, *, exact: bool = False) -> None:
        super().__init__(places, recipe, seed, step)
        # where each tensor is, kept tensor by tensor: Ctrl-C may come between two of them
        self._at: dict[int, tuple[int, float]] = {}  # probe and how far along it
        self._ascent: dict[int, tuple[int, float]] = {}
        self._under_way: tuple[dict[int, tuple[int, float]], Place, tuple[int, float], int] | None = None
        self._home = {p.index: p.parameter.detach().clone() for p in places if exact or p.parameter.dtype in NARROW}

    def perturb(self, probe: int, sign: int) -> None:
        """Move there, from the same probe's other end in one go."""
        for place in self.places:
            self._move(self._at, place, probe, sign * float(place.group["eps"]))

    def restore(self) -> None:
        """Move back to where the probes start."""
        self._undo(self._at)

    def ascend(self, probe: int, sign: int, distance: float) -> None:
        """Move along ``probe`` and let the probes start there."""
        for place in self.places:
            self._move(self._ascent, place, probe, sign * distance)

    def return_home(self) -> None:
        """Undo probe and ascent."""
        if self._under_way is not None:  # Ctrl-C came within a move: the tensor's version tells whether it was made
            moves, place, there, version = self._under_way
            if place.parameter._version != version:
                moves[place.index] = there
            self._under_way = None
        self._undo(self._at)
        self._undo(self._ascent)
        for place in self.places:
            if place.index in self._home:
                place.parameter.copy_(self._home[place.index])

    def update(self, differences: Sequence[float], estimator: str) -> None:
        """Gradient descent along the estimate, tensor by tensor."""
        for place in self.places:
            weights = coefficients(differences, estimator=estimator, eps=float(place.group["eps"]))
            estimate = torch.zeros_like(place.parameter, dtype=torch.float32)
            for probe, weight in enumerate(weights):
                drawn = self._direction(place, probe)
                if self.recipe.kernel_norm:
                    weight *= self.relative(place, float(place.parameter.norm()), float(drawn.norm()))
                estimate.add_(drawn, alpha=weight)
            if self.recipe.guide is not None:
                self._remember(place, estimate)
            place.parameter.add_(
                self._smoothed(place, estimate).to(place.parameter.dtype), alpha=-float(place.group["lr"])
            )

    def _move(self, moves: dict[int, tuple[int, float]], place: Place, probe: int, distance: float) -> None:
        before, here = moves.get(place.index, (probe, 0.0))
        if before != probe:
            self._move(moves, place, before, 0.0)
            here = 0.0
        drawn = self._direction(place, probe).to(place.parameter.dtype)
        self._under_way = (moves, place, (probe, distance), place.parameter._version)
        place.parameter.add_(drawn, alpha=distance - here)
        moves[place.index] = (probe, distance)
        self._under_way = None

    def _undo(self, moves: dict[int, tuple[int, float]]) -> None:
        for place in self.places:
            if place.index in moves:
                self._move(moves, place, moves[place.index][0], 0.0)
                del moves[place.index]

    def _direction(self, place: Place, probe: int) -> Tensor:
        drawn = self.random(place, probe)
        if self.recipe.guide is not None and "guide" in place.state:
            beta, alpha = self.recipe.guide
            # beta N(0, alpha) + (1 - beta) N(guide, 1 - alpha), scaled so that elements keep a variance of one
            spread = beta**2 * alpha + (1 - beta) ** 2 * (1 - alpha)
            size = (spread + (1 - beta) ** 2) ** 0.5
            drawn = drawn.mul_(spread**0.5 / size).add_(place.state["guide"], alpha=(1 - beta) / size)
        mask = self.mask(place)
        return drawn if mask is None else drawn.mul_(mask)

    def _remember(self, place: Place, estimate: Tensor) -> None:
        size = estimate.square().mean().sqrt()
        if float(size) > 0:
            place.state["guide"] = estimate / size

    def _smoothed(self, place: Place, estimate: Tensor) -> Tensor:
        """The mean over past estimates, recent ones first; without momentum the estimate itself."""
        momentum = self.recipe.momentum
        if momentum == 0:
            return estimate
        state = place.state
        if "momentum" not in state:
            state["momentum"], state["updates"] = torch.zeros_like(estimate), 0
        buffer: Tensor = state["momentum"]
        buffer.mul_(momentum).add_(estimate, alpha=1 - momentum)
        state["updates"] += 1
        return buffer / (1.0 - momentum ** int(state["updates"]))
