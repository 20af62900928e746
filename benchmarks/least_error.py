"""Activation ranges with the least squared error: a little clipping for finer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from lightning_npu.compile.calibrate import is_mask, session

_BINS = 2048
_VALUES_PER_BATCH = 65536  # per tensor: enough for the shape of a distribution, small enough for every tensor at once
_CANDIDATES = np.linspace(0.2, 1.0, 41)  # shares of the extremes


def least_error_ranges(
    model: onnx.ModelProto,
    batches: Iterable[Mapping[str, np.ndarray]],
    extremes: Mapping[str, tuple[float, float]],
    levels: int,
) -> dict[str, tuple[float, float]]:
    """Per tensor, the range within its extremes that loses least when it is quantised.

    The loss is that of rounding inside the range plus that of clipping outside, over a histogram of values that were
    sampled at a fixed stride from every batch.

    Args:
        model: FP32, with inferred shapes.
        batches: the same as gave the extremes.
        extremes: (smallest, largest) per tensor name.
        levels: values that the quantised type has: 256 for 8 bits.

    Returns:
        (smallest, largest) per tensor name; masks and constants keep their extremes.
    """
    wanted = {name: edges for name, edges in extremes.items() if edges[0] < edges[1] and not is_mask(edges)}
    histograms = {name: np.zeros(_BINS) for name in wanted}
    run = session(_with_samples(model, list(wanted)))
    for batch in batches:
        for (name, edges), values in zip(wanted.items(), run.run(None, dict(batch)), strict=True):
            # a zero is exact in every range, so it must not count
            histograms[name] += np.histogram(values[values != 0], _BINS, edges)[0]
    chosen = dict(extremes)
    for name, edges in wanted.items():
        chosen[name] = least_error_range(histograms[name], *edges, levels)
    return chosen


def least_error_range(histogram: np.ndarray, low: float, high: float, levels: int) -> tuple[float, float]:
    """The range of least squared error for values whose histogram spans ``low`` to ``high``.

    Args:
        histogram: counts in bins of equal width.
        low: left edge of the first bin.
        high: right edge of the last bin.
        levels: values that the quantised type has.
    """
    if histogram.sum() == 0:
        return low, high
    centres = low + (np.arange(histogram.size) + 0.5) * (high - low) / histogram.size
    lows = min(low, 0.0) * _CANDIDATES if low < 0 else np.zeros(1)
    highs = max(high, 0.0) * _CANDIDATES if high > 0 else np.zeros(1)
    below = np.square(np.minimum(centres - lows[:, None], 0)) @ histogram
    above = np.square(np.maximum(centres - highs[:, None], 0)) @ histogram
    steps = (highs[None, :] - lows[:, None]) / (levels - 1)
    error = below[:, None] + above[None, :] + histogram.sum() * np.square(steps) / 12
    row, column = np.unravel_index(int(error.argmin()), error.shape)
    return float(lows[row]), float(highs[column])


def _with_samples(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """The model with a sample of each tensor's values as its only outputs."""
    augmented = onnx.ModelProto()
    augmented.CopyFrom(model)
    graph = augmented.graph
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    del graph.output[:]
    for name, numbers in (("flat", [-1]), ("start", [0]), ("end", [2**62]), ("axis", [0])):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers, np.int64), f"sample_{name}"))
    for index, name in enumerate(names):
        sizes = [dim.dim_value or 8 for dim in values[name].type.tensor_type.shape.dim]  # 8: a usual dynamic batch
        stride = _prime(max(1, math.prod(sizes) // _VALUES_PER_BATCH))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([stride], np.int64), f"sample_stride_{index}"))
        flat, output = f"sample_flat_{index}", f"sample_{index}"
        graph.node.append(onnx.helper.make_node("Reshape", [name, "sample_flat"], [flat]))
        bounds = ["sample_start", "sample_end", "sample_axis", f"sample_stride_{index}"]
        graph.node.append(onnx.helper.make_node("Slice", [flat, *bounds], [output]))
        graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, [None]))
    return augmented


def _prime(number: int) -> int:
    """The next prime from here on, so that a stride never falls in step with rows or channels."""
    while number > 2 and any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
