"""``compile_module``: the steps from a module to an artifact, in order; each step has a module of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_npu.artifact import Artifact, new_folder, write_manifest
from lightning_npu.compile.flat import FlatModule, resize_batch, tensor_specs
from lightning_npu.compile.samples import Samples, collect, divide
from lightning_npu.compile.undisturbed import undisturbed
from lightning_npu.errors import CompileError, InputError
from lightning_npu.hashing import state_sha256
from lightning_npu.runtimes.base import Runtime
from lightning_npu.runtimes.cpu import instruction_set

if TYPE_CHECKING:
    from lightning_npu.artifact import OutputFidelity
    from lightning_npu.tensor_spec import TensorSpec

TARGETS = ("onnx",)
PRECISIONS = ("a8w8", "a16w8", "fp32")
CALIBRATION_SAMPLES, HOLDOUT_SAMPLES = 128, 32
_TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
_PROBE_SAMPLES, _PROBE_BYTES = 8, 16 << 20


def compile_module(
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    calibration: Iterable[Any],
    output: str | Path,
    target: str = "onnx",
    precision: str = "a8w8",
    recipe: str = "faithful",
    example_kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    batch_axis: int | Sequence[int | None] = 0,
    calibration_samples: int = CALIBRATION_SAMPLES,
    holdout_samples: int = HOLDOUT_SAMPLES,
    min_sqnr_db: float | None = 20.0,
    overwrite: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Artifact:
    """Compile a frozen module into an artifact.

    The module is exported to ONNX and checked against torch, quantized with the calibration data, and judged end to
    end through the runtime on samples that did not calibrate. Nothing appears at ``output`` unless all of it succeeds.

    Args:
        module: FP32 module; it is not changed, apart from being in eval mode while this runs.
        example_inputs: positional arguments of one call.
        calibration: iterable of inputs, each a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments; real data like that of the training. Read until there are enough samples.
        output: path of the artifact folder, by convention ``*.npu``.
        target: what it is compiled for: "onnx", the embedded default.
        precision: "a8w8" (8-bit activations and weights), "a16w8", or "fp32".
        recipe: "faithful": the numerics of an INT8 accelerator, executed exactly on this processor; "fast": the
            fastest INT8 that this processor has.
        example_kwargs: keyword arguments of the example call.
        batch_size: samples per call to fix, as accelerators want; None leaves the batch dynamic.
        batch_axis: the inputs' batch axis, one for all or one per tensor; None for an input that samples share.
        calibration_samples: how many samples calibrate at most.
        holdout_samples: how many further samples judge fidelity at most.
        min_sqnr_db: the least SQNR in dB that every output must reach; None accepts any.
        overwrite: replace an artifact that is at ``output`` already.
        source: further entries for the manifest's ``source``: ``submodule``, ``cut``.

    Returns:
        The artifact, loaded.

    Raises:
        InputError: bad example inputs or calibration data.
        CompileError: the module cannot be exported or quantized.
        FidelityError: an output is below ``min_sqnr_db``.
        ArtifactError: ``output`` exists.
    """
    _check_options(target, precision, recipe, batch_size)
    output = Path(output)
    with undisturbed(module), new_folder(output, overwrite=overwrite) as folder:
        flat = FlatModule(module, tuple(example_inputs), dict(example_kwargs or {})).eval()
        inputs, outputs = tensor_specs(flat, batch_axis=batch_axis, batch_size=batch_size)
        samples = collect(calibration, flat.signature, inputs, limit=calibration_samples + holdout_samples)
        calibrating, judging = divide(samples, holdout=holdout_samples)
        roles, report, reached = _build(flat, inputs, outputs, calibrating, folder, precision, recipe)
        fidelity = _judge(flat, folder / roles["model"], inputs, outputs, judging)
        if min_sqnr_db is not None:
            from lightning_npu.compile.fidelity import check

            check(fidelity, min_sqnr_db=min_sqnr_db, recipe=report["name"], precision=reached)
        if _save_probe(judging, folder / "probe.npz"):
            roles["probe"] = "probe.npz"
        content = {
            "target": target,
            "precision": reached,
            "recipe": report,
            "inputs": [spec.to_json() for spec in inputs],
            "outputs": [spec.to_json() for spec in outputs],
            "signature": flat.signature.to_json(),
            "structure": flat.structure.to_json(),
            "source": _source(module, source or {}),
            "calibration": {
                "samples": calibrating.count,
                "holdout_samples": judging.count,
                "sha256": calibrating.sha256(),
            },
            "fidelity": {
                "runtime": "onnx",
                "instruction_set": instruction_set(),
                "min_sqnr_db": min_sqnr_db,
                "outputs": {name: figures.to_json() for name, figures in fidelity.items()},
            },
            "tools": {"lightning-npu": version("lightning-npu"), **{tool: version(tool) for tool in _TOOLS}},
        }
        write_manifest(folder, content, roles)
    return Artifact.load(output)


def _check_options(target: str, precision: str, recipe: str, batch_size: int | None) -> None:
    from lightning_npu.compile.quantize import RECIPES

    choices = {"target": (target, TARGETS), "precision": (precision, PRECISIONS), "recipe": (recipe, RECIPES)}
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            raise CompileError(f"There is no {option} '{value}'.", expected=f"one of {list(allowed)}", got=repr(value))
    if batch_size is not None and batch_size < 1:
        raise InputError("batch_size must be at least 1.", expected="None or a positive number", got=batch_size)


def _build(
    flat: FlatModule,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    calibrating: Samples,
    folder: Path,
    precision: str,
    recipe: str,
) -> tuple[dict[str, str], dict[str, Any], str]:
    """Export, and quantize unless FP32 is asked for; gives the files by role, the recipe's report, the precision."""
    from lightning_npu.compile.export import export_onnx

    reference = folder / "reference.onnx"
    fixed = next((spec.static_batch for spec in inputs if spec.static_batch is not None), None)
    example = flat.example
    if fixed is not None:
        example = resize_batch(example, [spec.batch_axis for spec in inputs], fixed)
    exported = export_onnx(
        flat,
        example,
        reference,
        inputs=inputs,
        outputs=outputs,
        check_batches=(1, 2, 3) if fixed is None else (fixed,),
    )
    export_facts = {"opset": exported.opset, "max_abs_error": dict(exported.max_abs_error)}
    if precision == "fp32":
        roles = {"model": reference.name, "reference": reference.name}
        return roles, {"name": "fp32", "export": export_facts}, "fp32"
    from lightning_npu.compile.quantize import quantize_onnx

    names = [spec.name for spec in inputs]
    feeds = (
        {name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)}
        for batch in calibrating.batches(fixed or 8)
    )
    report = quantize_onnx(reference, folder / "model.onnx", feeds, recipe=recipe, precision=precision)
    facts = {"name": report.recipe, "export": export_facts, **report.to_json()}
    return {"model": "model.onnx", "reference": reference.name}, facts, report.precision


class _TorchReference(Runtime):
    """The FP32 module itself, as what a candidate is compared to."""

    name: ClassVar[str] = "torch"
    targets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, flat: FlatModule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self.flat, self.inputs, self.outputs = flat, tuple(inputs), tuple(outputs)
        self.fingerprint, self.device = "", "CPU"

    @classmethod
    def available(cls) -> str:
        """Always: torch is here."""
        return "ok: torch"

    @classmethod
    def open(cls, artifact: Artifact, *, device_index: int | None = None, **options: Any) -> Runtime:
        """Not from an artifact: it is made from a module."""
        raise CompileError("The torch reference is made from a module, not from an artifact.")

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run the module."""
        with torch.no_grad():
            return [tensor.detach().cpu() for tensor in self.flat(*(self._place(t) for t in inputs))]

    def close(self) -> None:
        """Nothing to release."""

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.flat.example[0].device)


def _judge(
    flat: FlatModule,
    model: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    judging: Samples,
) -> dict[str, OutputFidelity]:
    from lightning_npu.compile.fidelity import measure
    from lightning_npu.runtimes.onnx import OnnxRuntime

    fixed = next((spec.static_batch for spec in inputs if spec.static_batch is not None), None)
    runtime = OnnxRuntime(model, inputs, outputs)
    try:
        return measure(_TorchReference(flat, inputs, outputs), runtime, judging.batches(fixed or 8))
    finally:
        runtime.close()


def _save_probe(judging: Samples, path: Path) -> bool:
    """Keep a few judging samples, so that another machine can measure again; none where one sample is too large."""
    import numpy as np

    per_sample = sum(t.numel() * t.element_size() for t in judging.tensors) // judging.count
    count = min(_PROBE_SAMPLES, judging.count, _PROBE_BYTES // max(1, per_sample))
    if count == 0:
        return False
    part = judging.part(0, count)
    arrays = {spec.name: tensor.numpy() for spec, tensor in zip(part.specs, part.tensors, strict=True)}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return True


def _source(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "submodule": None,
        "cut": None,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "state": state_sha256(module),
        **given,
    }
