"""FP32 ONNX to static INT8 in QDQ form, by a recipe that fits the processor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lightning_npu.compile.calibrate import calibrate
from lightning_npu.compile.insert import WeightType, insert_qdq, prepare
from lightning_npu.compile.qdq import QuantizedGraph
from lightning_npu.compile.rewrite import biases_into_products, keep_scores_in_float
from lightning_npu.compile.rounding import WeightRounding
from lightning_npu.compile.stem import stem_on_blocks
from lightning_npu.errors import CompileError
from lightning_npu.runtimes.cpu import exact_u8s8
from lightning_npu.runtimes.cpu import instruction_set as this_instruction_set

RECIPES = ("faithful", "fast")
PRECISIONS = ("a8w8", "a16w8")


@dataclass(frozen=True)
class QuantizationReport:
    """How a file was quantised and what it became.

    Attributes:
        recipe: "faithful" or "fast".
        precision: what the graph is: "a8w8", "a16w8", "mixed" or "fp32"; read from the graph, not from the wish.
        weight_type: "int8" or "uint8" (zero point 128).
        activation_type: "uint8" or "uint16".
        per_channel: whether every output channel of a weight has a scale of its own.
        reduce_range: whether weights use 7 of their 8 bits, so that sums in 16 bits do not saturate.
        calibration: how activation ranges were found.
        calibration_batches: batches that were read.
        float_nodes: per operator, nodes left in float.
        node_counts: per operator, nodes of the file.
        instruction_set: the instruction set that the recipe was chosen for.
        remedies: what was done for fidelity, in words.
        tools: versions of the packages that did it.
    """

    recipe: str
    precision: str
    weight_type: str
    activation_type: str
    per_channel: bool
    reduce_range: bool
    calibration: str
    calibration_batches: int
    float_nodes: Mapping[str, int]
    node_counts: Mapping[str, int]
    instruction_set: str
    remedies: tuple[str, ...]
    tools: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready primitives."""
        return {**asdict(self), "remedies": list(self.remedies)}


def _weights(recipe: str, instruction_set: str) -> WeightType:
    """The weight type with which this processor computes what the recipe promises.

    Where sums of products saturate at 16 bits, signed weights are either wrong or cut to 7 bits: faithful takes
    unsigned weights, which are exact and slower; fast takes the 7 bits. Elsewhere signed weights are both.
    """
    if exact_u8s8(instruction_set):
        return WeightType(signed=True, reduce_range=False)
    if recipe == "faithful":
        return WeightType(signed=False, reduce_range=False)
    return WeightType(signed=True, reduce_range=True)


def quantize_onnx(
    source: Path,
    target: Path,
    calibration: Iterable[Mapping[str, np.ndarray]],
    *,
    recipe: str = "faithful",
    precision: str = "a8w8",
    instruction_set: str | None = None,
) -> QuantizationReport:
    """Quantise an FP32 ONNX file with real data.

    Args:
        source: the FP32 file.
        target: the file to write; appears only when it is complete.
        calibration: per batch, an array per input; kept in memory, as it is read several times.
        recipe: "faithful": the numerics of an INT8 accelerator, executed exactly on the processor; "fast": the
            fastest INT8 of the processor.
        precision: "a8w8", or "a16w8" for activations in 16 bits.
        instruction_set: the processor to quantise for, as ``runtimes.cpu.instruction_set`` names it; default: this
            machine's.

    Raises:
        CompileError: unknown recipe or precision; no calibration data; data or activations that are NaN; a graph that
            cannot be quantised.
    """
    for option, value, allowed in (("recipe", recipe, RECIPES), ("precision", precision, PRECISIONS)):
        if value not in allowed:
            raise CompileError(f"There is no {option} '{value}'.", expected=f"one of {list(allowed)}", got=repr(value))
    instruction_set = instruction_set or this_instruction_set()
    weights = _weights(recipe, instruction_set)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        model = stem_on_blocks(biases_into_products(prepare(source, Path(scratch) / "prepared.onnx")))
        batches = list(calibration)
        ranges = calibrate(model, batches)
        rounding = WeightRounding(model)
        rounding.observe(batches)
        quantized = insert_qdq(model, ranges, weights, precision)
        rounded = rounding.apply(quantized, largest=weights.largest)
        scores = keep_scores_in_float(quantized)
        complete = Path(scratch) / target.name
        onnx.save(quantized, complete)
        complete.replace(target)
    graph = QuantizedGraph(quantized)
    return QuantizationReport(
        recipe=recipe,
        precision=graph.precision,
        weight_type="int8" if weights.signed else "uint8",
        activation_type="uint8" if precision == "a8w8" else "uint16",
        per_channel=True,
        reduce_range=weights.reduce_range,
        calibration="minmax",
        calibration_batches=len(batches),
        float_nodes=graph.float_nodes,
        node_counts=graph.node_counts,
        instruction_set=instruction_set,
        remedies=(
            f"weights of {rounded} convolutions rounded by second order",
            f"scores of {scores} softmaxes not rounded",
            "biases in the accumulator",
        ),
        tools=_tools(),
    )


def _tools() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("onnx", "onnxruntime", "numpy")}
