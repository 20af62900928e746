"""The value range of every float tensor in an ONNX graph, from calibration data; memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx

from lightning_npu.errors import CompileError
from lightning_npu.runtimes.cpu import available_cores

_MASK = 1e30  # attention masks hold -inf or the dtype's minimum: no range in which 8 bits could count


def float_tensors(model: onnx.ModelProto) -> list[str]:
    """Names of all float tensors that nodes read or write and that are no constants, in graph order.

    Args:
        model: with inferred shapes.
    """
    graph = model.graph
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    constants = {constant.name for constant in graph.initializer}
    names = (name for node in graph.node for name in (*node.input, *node.output))
    return [
        name
        for name in dict.fromkeys(names)
        if name in values
        and name not in constants
        and values[name].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    ]


def calibrate(model: onnx.ModelProto, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of every float tensor over all batches.

    The graph itself takes the minima and maxima, so that two numbers per tensor leave it and nothing is kept.

    Args:
        model: FP32, with inferred shapes.
        batches: per batch, an array per graph input.

    Returns:
        (smallest, largest) per tensor name.

    Raises:
        CompileError: there is no batch, or a value is NaN; the message names the first such tensor.
    """
    names = float_tensors(model)
    run = session(_with_extremes(model, names))
    lowest, highest = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    count = 0
    for count, batch in enumerate(batches, 1):
        check_batch(batch, count)
        extremes = np.array([float(value) for value in run.run(None, dict(batch))]).reshape(-1, 2)
        if np.isnan(extremes).any():
            raise CompileError(
                f"Tensor '{names[int(np.isnan(extremes).any(axis=1).argmax())]}' becomes NaN in FP32 "
                f"on calibration batch {count}.",
                expected="finite values",
                got="NaN",
                remedy="check that the calibration data are preprocessed as in training, and the weights sound",
            )
        lowest, highest = np.minimum(lowest, extremes[:, 0]), np.maximum(highest, extremes[:, 1])
    if count == 0:
        raise CompileError(
            "There are no calibration data.",
            expected="at least one batch",
            got="none",
            remedy="check that the calibration loader is not empty and was not used up before",
        )
    return dict(zip(names, zip(lowest.tolist(), highest.tolist(), strict=True), strict=True))


def check_batch(batch: Mapping[str, np.ndarray], number: int) -> None:
    """Refuse calibration data that are not finite.

    Raises:
        CompileError: names the input and the batch.
    """
    for name, array in batch.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise CompileError(
                f"Calibration batch {number} holds values of input '{name}' that are not finite.",
                expected="finite numbers",
                got=f"{bad} of {array.size} values are NaN or infinite",
                remedy="remove or repair these samples",
            )


def is_mask(extremes: tuple[float, float]) -> bool:
    """Whether a range belongs to a tensor that marks places with infinities or the largest numbers there are."""
    return not all(abs(value) < _MASK for value in extremes)


def _with_extremes(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    augmented = onnx.ModelProto()
    augmented.CopyFrom(model)
    del augmented.graph.output[:]
    for index, name in enumerate(names):
        for kind in ("ReduceMin", "ReduceMax"):
            output = f"calibrate_{kind}_{index}"
            augmented.graph.node.append(onnx.helper.make_node(kind, [name], [output], keepdims=0))
            augmented.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, []))
    return augmented


def session(model: onnx.ModelProto) -> Any:
    """An ONNX Runtime session that keeps every tensor as the graph names it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_cores()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # fusions would remove the tensors whose ranges are wanted
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), sess_options=options, providers=["CPUExecutionProvider"]
    )
