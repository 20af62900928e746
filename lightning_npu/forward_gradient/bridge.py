"""The bridge: backpropagation across a frozen module that has no backward pass, by forward calls alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.directions import check_distribution
from lightning_npu.forward_gradient.structured import Structure


@dataclass(frozen=True)
class Bridge:
    """How a frozen module becomes differentiable: ``NPUFrozenModule(..., gradient=Bridge(m=4))``.

    A call of the module is one call of the device, as ever. In the backward pass, each sample's product of its output
    gradient v with the Jacobian J of the device is estimated from 2m further calls for each input that requires grad::

        J^T v  ~  1/m  sum over m directions u of  <v, f(x + eps u) - f(x - eps u)> / (2 eps)  u

    Its expectation is the gradient (of f smoothed over eps); its cosine to it is about sqrt(m / d) for d values per
    sample. What is trained before the module averages over samples and steps. Inputs are moved one after the other:
    together, the slope that one of them causes would be noise in the estimate for the others.

    Args:
        m: directions per backward pass and input.
        eps: how far each input is moved, in its own units: "auto" (4 steps of the INT8 grid of the input, see
            ``module.stats["gradient"]["eps"]`` for the value and where it is from), a number, or either by input name.
        distribution: "rademacher" or "gaussian".
        max_batch: the most samples that are stacked into one call (whole batches: at least one); None: no limit. A
            runtime of a fixed batch gets its batches either way.
        seed: of the directions. Each rank of a distributed run adds its number: ranks see different directions.
        structure: draw directions in a subspace of images: ``Blocks``, ``LowFrequency`` or ``Colour``, for every input
            or by input name.

    Raises:
        InputError: a value that cannot be.
    """

    m: int = 1
    eps: float | str | Mapping[str, float | str] = "auto"
    distribution: str = "rademacher"
    max_batch: int | None = None
    seed: int = 0
    structure: Structure | Mapping[str, Structure] | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("m", self.m, 1), ("max_batch", self.max_batch, 1), ("seed", self.seed, None)):
            if value is None and name == "max_batch":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                expected = "an integer" if least is None else f"an integer from {least} on"
                _refuse(name, f"None, or {expected}" if name == "max_batch" else expected, value)
        for eps in self.eps.values() if isinstance(self.eps, Mapping) else (self.eps,):
            if eps != "auto" and not _is_positive(eps):
                _refuse("eps", "'auto', a positive number, or these by input name", eps)
        check_distribution(self.distribution)
        for structure in self.structure.values() if isinstance(self.structure, Mapping) else (self.structure,):
            if structure is not None and not isinstance(structure, Structure):
                _refuse("structure", "Blocks(8), LowFrequency(8), Colour(), or these by input name", structure)

    @staticmethod
    def of(option: object) -> Bridge | None:
        """The options that a user meant by ``gradient=``.

        Raises:
            InputError: something else than None, "forward" or a bridge.
        """
        if option is None or isinstance(option, Bridge):
            return option
        if option == "forward":
            return Bridge()
        raise InputError(
            "gradient is wrong.",
            expected="None, 'forward' or a forward_gradient.Bridge(...)",
            got=repr(option)[:200],
            remedy="gradient='forward' is gradient=Bridge() with its defaults",
        )

    def eps_of(self, name: str) -> float | str:
        """The option for one input."""
        return self.eps.get(name, "auto") if isinstance(self.eps, Mapping) else self.eps

    def structure_of(self, name: str) -> Structure | None:
        """The subspace for one input."""
        return self.structure.get(name) if isinstance(self.structure, Mapping) else self.structure


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise InputError(f"Bridge({name}=...) is wrong.", expected=expected, got=repr(got)[:200])
