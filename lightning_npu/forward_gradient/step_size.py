"""How far to move an input for a difference that an integer device can see: by the input's own quantisation step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact

STEPS, LEVELS = 4, 255
"""An input moves by 4 steps of the 255 that 8 bits have."""

# operators that hand values on: a quantiser behind them quantises the input
_SAME_VALUES = frozenset({"Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "SpaceToDepth"})


@dataclass(frozen=True)
class StepSize:
    """How far an input is moved, and where that is from.

    Attributes:
        value: in units of the input.
        source: in words.
    """

    value: float
    source: str


def of_artifact(artifact: Artifact | None) -> Mapping[str, StepSize]:
    """The step by input name, from the quantisers of the artifact's ONNX model; without those it does not quantise.

    With 8 bits it is 4 times the input's scale; with 16, as far as 8 bits over the same range would move it, since what
    follows is not all that fine.
    """
    entries = {} if artifact is None else artifact.manifest["files"]
    if artifact is None or "model" not in entries:
        return {}
    path = artifact.file("model")
    return _of_model(path) if path.suffix == ".onnx" else {}


def of_spread(values: Tensor) -> StepSize:
    """The step from the range of the values themselves, where nothing says how they are quantised."""
    spread = float(values.max() - values.min()) if values.numel() else 0.0
    if spread == 0.0:  # a constant tells nothing about its range
        return StepSize(STEPS / LEVELS, f"{STEPS}/{LEVELS} of 1, since the first batch was constant")
    return StepSize(STEPS / LEVELS * spread, f"{STEPS}/{LEVELS} of the range of the first batch, {spread:.4g}")


def _of_model(path: Path) -> Mapping[str, StepSize]:
    import onnx

    graph = onnx.load(path).graph
    constants = {constant.name: constant for constant in graph.initializer}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)

    def quantisers(name: str) -> list[tuple[float, int]]:
        """Scale and number of levels of each quantiser that sees this tensor's values."""
        found = []
        for node in users.get(name, ()):
            if node.op_type == "QuantizeLinear" and node.input[1] in constants:
                scale = float(onnx.numpy_helper.to_array(constants[node.input[1]]).max())
                point = constants.get(node.input[2]) if len(node.input) > 2 else None
                wide = point is not None and point.data_type in (onnx.TensorProto.UINT16, onnx.TensorProto.INT16)
                found.append((scale, 65535 if wide else 255))
            elif node.op_type in _SAME_VALUES:
                found += quantisers(node.output[0])
        return found

    return {value.name: _coarsest(seen) for value in graph.input if (seen := quantisers(value.name))}


def _coarsest(quantisers: Sequence[tuple[float, int]]) -> StepSize:
    scale, levels = max(quantisers, key=lambda pair: pair[0] * pair[1])
    if levels == LEVELS:
        return StepSize(STEPS * scale, f"{STEPS} steps of the input's INT8 scale, {scale:.4g}")
    spread = scale * levels
    return StepSize(STEPS / LEVELS * spread, f"{STEPS}/{LEVELS} of the input's calibrated 16-bit range, {spread:.4g}")
