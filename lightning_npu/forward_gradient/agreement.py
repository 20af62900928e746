"""How good estimates of a gradient are, told by two halves of them that know nothing of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

_MEMORY = 100
"""Backward passes that the figure looks back on, about."""


class Agreement:
    """The cosine between two independent estimates of one gradient, over the last passes.

    Attributes:
        value: the cosine; None before the first.
    """

    def __init__(self) -> None:
        self._products = [0.0, 0.0, 0.0]

    def add(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the two estimates of one pass, a pair per input."""
        new = [
            sum(float(left.flatten() @ right.flatten()) for left, right in products)
            for products in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
        ]
        if all(math.isfinite(product) for product in new):  # a loss scale that overflowed says nothing
            keep = 1.0 - 1.0 / _MEMORY
            self._products = [keep * old + product for old, product in zip(self._products, new, strict=True)]

    @property
    def value(self) -> float | None:
        """The cosine of the halves; None before the first pass."""
        both, first, second = self._products
        return both / math.sqrt(first * second) if first > 0 and second > 0 else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the whole estimate to the gradient that this implies: sqrt(2 a / (1 + a)) (Spearman, Brown)."""
        value = self.value
        return None if value is None else math.sqrt(2 * max(value, 0.0) / (1 + max(value, 0.0)))
