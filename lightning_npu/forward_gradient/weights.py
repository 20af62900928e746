"""The weights that an optimizer probes: how they are moved to a probe, brought back, and updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_npu.forward_gradient.directions import direction

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Recipe:
    """The options of a step that concern directions and updates; see :class:`ForwardGradient`."""

    distribution: str
    momentum: float
    guide: tuple[float, float] | None
    kernel_norm: bool
    density: float


@dataclass(frozen=True)
class Place:
    """A tensor of the optimizer: the parameter, its group, its number among all, its state."""

    parameter: Tensor
    group: dict[str, Any]
    index: int
    state: dict[str, Any]


class ProbedWeights(ABC):
    """All tensors of one kind. Between steps they hold what was trained; within a step, a probe's weights.

    Args:
        places: the tensors.
        recipe: options.
        seed: of the directions.
        step: number of the step; a new object is made for each.
    """

    def __init__(self, places: Sequence[Place], recipe: Recipe, seed: int, step: int) -> None:
        self.places, self.recipe, self.seed, self.step = places, recipe, seed, step

    @abstractmethod
    def perturb(self, probe: int, sign: int) -> None:
        """Move to ``sign * eps`` along the direction of ``probe`` from where the probes start."""

    @abstractmethod
    def restore(self) -> None:
        """Move back to where the probes start."""

    @abstractmethod
    def ascend(self, probe: int, sign: int, distance: float) -> None:
        """Let the probes start at ``sign * distance`` along the direction of ``probe`` from the trained weights."""

    @abstractmethod
    def return_home(self) -> None:
        """Move back to the trained weights, from wherever they are."""

    @abstractmethod
    def update(self, differences: Sequence[float], estimator: str) -> None:
        """Move the trained weights, given each probe's difference of losses."""

    def random(self, place: Place, probe: int) -> Tensor:
        """A direction as it is drawn: float32 on the parameter's device."""
        return direction(
            place.parameter.shape,
            seed=self.seed,
            step=self.step,
            probe=probe,
            index=place.index,
            distribution=self.recipe.distribution,
            device=place.parameter.device,
        )

    def values(self, place: Place) -> Tensor:
        """What the weights stand for, in float64."""
        return place.parameter.detach().double()

    def mask(self, place: Place) -> Tensor | None:
        """Which weights are trained; None for all. Chosen in the first step: the largest of each matrix or kernel."""
        if self.recipe.density == 1.0 or place.parameter.ndim < 2:
            return None
        if "mask" not in place.state:
            size = self.values(place).abs()
            kept = min(size.numel(), max(1, round(self.recipe.density * size.numel())))
            mask = torch.zeros(size.numel(), dtype=torch.bool, device=size.device)
            mask[size.flatten().topk(kept).indices] = True
            place.state["mask"] = mask.view(size.shape)
        found: Tensor = place.state["mask"]
        return found

    def relative(self, place: Place, size: float, direction_norm: float) -> float:
        """Kernel-wise normalisation: a step as long, relative to the direction, as the weights are.

        A tensor of zeros would never move; it counts as if its elements had the size 1e-3.
        """
        floor = 1e-3 * place.parameter.numel() ** 0.5
        return max(size, floor) / direction_norm if direction_norm > 0 else 0.0
