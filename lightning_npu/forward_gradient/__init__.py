"""Training what backpropagation cannot reach, by forward calls alone; see docs/forward_gradient.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_npu.forward_gradient.bridge import Bridge as Bridge
    from lightning_npu.forward_gradient.fixed_point import FixedPoint as FixedPoint
    from lightning_npu.forward_gradient.graph_weights import GraphWeights as GraphWeights
    from lightning_npu.forward_gradient.mixin import ForwardGradientMixin as ForwardGradientMixin
    from lightning_npu.forward_gradient.optimizer import ForwardGradient as ForwardGradient
    from lightning_npu.forward_gradient.structured import Blocks as Blocks
    from lightning_npu.forward_gradient.structured import Colour as Colour
    from lightning_npu.forward_gradient.structured import LowFrequency as LowFrequency

# public name -> module that defines it; resolved on first use: the mixin imports Lightning, the others do not
_PUBLIC = {
    "Blocks": "structured",
    "Bridge": "bridge",
    "Colour": "structured",
    "FixedPoint": "fixed_point",
    "ForwardGradient": "optimizer",
    "ForwardGradientMixin": "mixin",
    "GraphWeights": "graph_weights",
    "LowFrequency": "structured",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
