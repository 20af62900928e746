"""Torch to ONNX, by torch.export, checked against torch on the CPU."""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.compile.export_check import check_shapes, compare_with_torch, samples, with_samples
from lightning_npu.compile.quiet import quiet
from lightning_npu.errors import CompileError
from lightning_npu.tensor_spec import TensorSpec

OPSET = 20  # 23 would fuse attention into one operator that quantisers and NPU compilers do not split
IR_VERSION = 9  # what opset 20 needs; newer ones are refused by older runtimes and by vendor compilers
_DETECTS_MASK = "pass is_causal=True or False to the nn.Transformer: else it looks at the mask's values to find out"
EXPORTER = "torch.export + torch.onnx (dynamo)"


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        max_abs_error: per output name, the largest absolute difference between ONNX Runtime FP32 and torch over all
            batch sizes that were checked.
        checked_batches: the batch sizes; empty where no tensor has a batch axis.
        opset: version of the ONNX operator set.
        node_count: nodes in the graph.
        exporter: which exporter wrote it.
    """

    max_abs_error: dict[str, float]
    checked_batches: tuple[int, ...]
    opset: int
    node_count: int
    exporter: str


def export_onnx(
    module: nn.Module,
    example_inputs: tuple[Tensor, ...],
    path: Path,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    check_batches: Sequence[int] = (1, 2, 3),
) -> ExportReport:
    """Write a module as one ONNX file and compare the file with torch.

    Args:
        module: takes tensors positionally and returns a tensor or a tuple of tensors; on the CPU.
        example_inputs: what it takes; any batch size.
        path: the ONNX file to write; appears only once it was checked.
        inputs: one per input; None in a shape marks a dynamic batch.
        outputs: one per output.
        check_batches: batch sizes at which torch and ONNX Runtime are compared; a static batch is checked at itself.

    Raises:
        CompileError: the module cannot be traced, holds an operator that ONNX does not have, fixes the batch size,
            or the file computes something else than torch.
    """
    dynamic = any(None in spec.shape for spec in inputs)
    example = tuple(tensor.detach() for tensor in example_inputs)
    if dynamic:
        # a batch of 1 is where exporters silently specialise
        example = with_samples(example, inputs, max(2, samples(example, inputs) or 2))
    with _as_in_use(module), torch.no_grad():
        program = _trace(module, example, inputs)
        model = _convert(program, inputs, outputs)
        _clean(model)
        check_shapes(model, inputs, outputs)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            temporary.write_bytes(_serialize(model))
            report = compare_with_torch(module, example, temporary, inputs, outputs, check_batches if dynamic else ())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    errors, batches = report
    return ExportReport(errors, batches, OPSET, len(model.graph.node), EXPORTER)


@contextlib.contextmanager
def _as_in_use(module: nn.Module) -> Iterator[None]:
    """Eval mode without the fused inference kernels, which have no ONNX form; everything is put back."""
    modes = [(child, child.training) for child in module.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # set one by one: modules that torch.export made refuse eval()
    for child, _ in modes:
        child.training = False
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _trace(
    module: nn.Module, example: tuple[Tensor, ...], inputs: Sequence[TensorSpec]
) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    shapes = tuple({axis: batch for axis, size in enumerate(spec.shape) if size is None} for spec in inputs)
    try:
        with quiet():
            return torch.export.export(module, example, dynamic_shapes=_per_parameter(module, shapes), strict=False)
    except Exception as error:  # torch.export raises many kinds without a common base
        text = str(error)
        fixed = re.search(r"batch = (\d+)|specialized it to be a constant \((\d+)\)", text)
        if fixed:
            raise CompileError(
                "The module works for one batch size only, so it cannot be exported with a dynamic batch.",
                expected="a module that treats every sample alike",
                got=f"operations that fix the batch size to {fixed[1] or fixed[2]}",
                remedy="use sizes relative to x.shape[0] (for example x.flatten(1)), or compile with a static batch",
            ) from error
        raise CompileError(
            f"torch.export cannot trace the module: {text.strip().splitlines()[0]}",
            got=_user_line(error),
            remedy=_DETECTS_MASK
            if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__))
            else "replace Python decisions on tensor values by torch.where or torch.cond, avoid .item() and NumPy "
            "inside forward, or cut the module before that place",
        ) from error


def _per_parameter(module: nn.Module, shapes: tuple[dict[int, Any], ...]) -> tuple[Any, ...]:
    """The dynamic shapes in the form torch.export wants: nested once more where forward takes ``*tensors``."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    for index, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return (*shapes[:index], shapes[index:])
    return shapes


def _user_line(error: BaseException) -> str:
    """Where in the module's code the trace stopped."""
    package = Path(__file__).parent
    torch_folder = Path(torch.__file__).parent
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {package, torch_folder}.intersection(Path(frame.filename).parents)
    ]
    if not own:
        return type(error).__name__
    return f"`{own[-1].line}` ({Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})"


def _convert(program: torch.export.ExportedProgram, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Any:
    try:
        with quiet():
            converted = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                verbose=False,
            )
    except Exception as error:  # the exporter's own error classes are private
        raise _unsupported(program, error) from error
    assert converted is not None
    return converted.model_proto


def _unsupported(program: torch.export.ExportedProgram, error: BaseException) -> CompileError:
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = " ".join(str(link) for link in chain)
    found = re.search(r"OpOverload\(op='([\w.]+)', overload='(\w+)'\)", text)
    if found is None:
        return CompileError(
            f"The module cannot be written as ONNX: {str(chain[-1]).strip().splitlines()[0]}",
            remedy="cut the module before the part that fails, or report it with the module's code",
        )
    operator = f"{found[1]}.{found[2]}"
    return CompileError(
        f"ONNX has no form for the operator {operator}.",
        expected=f"operators of ONNX opset {OPSET}",
        got=_place(program, operator),
        remedy="cut the module before that place, so that the operator stays in torch, or rewrite it with operators "
        "that ONNX has",
    )


def _place(program: torch.export.ExportedProgram, operator: str) -> str:
    """Module path and code line of an operator, which may have appeared only when others were decomposed."""
    with quiet():
        stages = (program, program.run_decompositions())
    for stage in stages:
        for node in stage.graph.nodes:
            if node.op == "call_function" and str(node.target) == operator:
                stack = list((node.meta.get("nn_module_stack") or {}).values())
                path, kind = stack[-1] if stack else ("", "the module")
                lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
                code = f": `{lines[-1]}`" if lines and not lines[-1].startswith("File") else ""
                name = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
                return f"it is used in '{path}' ({name}){code}" if path else f"it is used in {name}{code}"
    return "it appeared while other operators were decomposed"


def _clean(model: Any) -> None:
    """Remove what would tell local paths or code, name the batch axis, and pin the version of the file format."""
    graph = model.graph
    model.ir_version = IR_VERSION
    model.doc_string = graph.doc_string = ""
    values = [*graph.input, *graph.output, *graph.value_info]
    for thing in (model, graph, *graph.node, *graph.initializer, *values):
        thing.doc_string = ""
        if hasattr(thing, "metadata_props"):  # nodes have them since onnx 1.16
            del thing.metadata_props[:]
    for index, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    symbols = {
        dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_param")
    }
    if len(symbols) == 1:
        symbol = re.compile(rf"\b{re.escape(symbols.pop())}\b")
        for value in values:
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param"):
                    dim.dim_param = symbol.sub("batch", dim.dim_param)


def _serialize(model: Any) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except ValueError as error:  # protobuf's limit
        raise CompileError(
            f"The module does not fit into one ONNX file: {error}",
            expected="less than 2 GiB of weights",
            remedy="cut the module earlier",
        ) from error
