"""Whether an exported ONNX graph is the module: its shapes, and its outputs at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.errors import CompileError
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec

RELATIVE_TOLERANCE = 1e-4  # of the output's largest value; correct exports stay under 1e-5


def check_shapes(model: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Refuse a graph whose inputs and outputs are not those of the specs: exporters may fix a batch without a word."""
    for kind, specs, values in (("input", inputs, model.graph.input), ("output", outputs, model.graph.output)):
        names = [value.name for value in values]
        if names != [spec.name for spec in specs]:
            raise CompileError(
                f"The exported graph has other {kind}s than the module.",
                expected=[spec.name for spec in specs],
                got=names,
                remedy="report it with the module's code",
            )
        for spec, value in zip(specs, values, strict=True):
            dims = value.type.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
            if shape != list(spec.shape):
                batch_fixed = len(shape) == len(spec.shape) and any(
                    size is None and got is not None for size, got in zip(spec.shape, shape, strict=True)
                )
                raise CompileError(
                    f"The exporter gave {kind} '{spec.name}' another shape than the module has"
                    + (": it fixed the batch size." if batch_fixed else "."),
                    expected=spec.describe_shape(),
                    got=[dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims],
                    remedy="compile with a static batch, or write the operations relative to x.shape[0]"
                    if batch_fixed
                    else "check that the module returns the same shapes for every input",
                )


def samples(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> int | None:
    """The batch size of the first tensor that has one."""
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.batch_axis is not None:
            return int(tensor.shape[spec.batch_axis])
    return None


def with_samples(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], count: int) -> tuple[Tensor, ...]:
    """The tensors at another batch size: samples are repeated, each repetition shifted so that no two are equal."""
    result = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.batch_axis is None:
            result.append(tensor)
            continue
        samples = tensor.movedim(spec.batch_axis, 0)
        rounds = -(-count // samples.shape[0])
        shifted = [samples.roll(turn, -1) if samples.ndim > 1 else samples for turn in range(rounds)]
        result.append(torch.cat(shifted)[:count].movedim(0, spec.batch_axis).contiguous())
    return tuple(result)


def compare_with_torch(
    module: nn.Module,
    example: tuple[Tensor, ...],
    path: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    check_batches: Sequence[int],
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Run the file by ONNX Runtime FP32 and the module by torch on the same inputs.

    Args:
        module: takes tensors, returns a tensor or a tuple of tensors.
        example: inputs from which those of other batch sizes are made.
        path: the ONNX file.
        inputs: one per input.
        outputs: one per output.
        check_batches: batch sizes; empty checks at the example's own.

    Returns:
        the largest absolute difference per output name, and the batch sizes.

    Raises:
        CompileError: a difference beyond ``RELATIVE_TOLERANCE``; names the worst output.
    """
    runtime = OnnxRuntime(path, inputs, outputs, threads=1)
    errors = {spec.name: 0.0 for spec in outputs}
    relative = dict(errors)
    own = samples(example, inputs)
    batches = tuple(check_batches) or ((own,) if own is not None else ())
    for batch in batches or (None,):
        tensors = example if batch is None else with_samples(example, inputs, batch)
        result = module(*(tensor.clone() for tensor in tensors))  # it may write into its inputs
        expected_outputs = (result,) if isinstance(result, Tensor) else result
        for spec, expected, actual in zip(outputs, expected_outputs, runtime.run(tensors), strict=True):
            error, scale = _difference(expected, actual)
            errors[spec.name] = max(errors[spec.name], error)
            relative[spec.name] = max(relative[spec.name], error / scale)
    runtime.close()
    name, worst = max(relative.items(), key=lambda item: item[1])
    if worst > RELATIVE_TOLERANCE:
        raise CompileError(
            f"The exported file computes something else than torch; output '{name}' is the worst.",
            expected=f"a difference of {RELATIVE_TOLERANCE:g} of the output's largest value or less",
            got=f"{worst:.3g} (absolute {errors[name]:.3g}) at batch sizes {list(batches)}",
            remedy="look for randomness, for state that changes between calls, and for operations that mix samples or "
            "depend on the batch size; cut the module before them",
        )
    return errors, batches


def _difference(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """Largest absolute difference and the scale to judge it by; infinite where shape or kind of dtype differ."""
    if expected.shape != actual.shape or expected.is_floating_point() != actual.is_floating_point():
        return float("inf"), 1.0
    if expected.numel() == 0:
        return 0.0, 1.0
    left, right = expected.detach().double(), actual.double()
    same = (left == right) | (left.isnan() & right.isnan())
    error = torch.where(same, 0.0, (left - right).abs()).max().item()
    finite = left[left.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return (error if error == error else float("inf")), max(scale, 1e-6)
