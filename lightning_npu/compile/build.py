"""Prepared inputs to a folder with an ONNX artifact: export, quantize, judge, describe."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_npu.artifact import Artifact, write_manifest
from lightning_npu.compile.flat import FlatModule, resize_batch, tensor_specs
from lightning_npu.compile.independence import require_independent
from lightning_npu.compile.npz import save_samples
from lightning_npu.compile.samples import Samples, collect, divide
from lightning_npu.errors import CompileError
from lightning_npu.hashing import state_sha256
from lightning_npu.runtimes.base import Runtime
from lightning_npu.runtimes.cpu import instruction_set
from lightning_npu.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from lightning_npu.artifact import OutputFidelity

log = logging.getLogger(__name__)

FEW_SAMPLES = 32
_TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
_PROBE_SAMPLES, _PROBE_BYTES = 8, 16 << 20


@dataclass(frozen=True)
class Prepared:
    """A module that can be compiled, with its data.

    Attributes:
        flat: the module as a function of flat tensors.
        inputs: what goes in.
        outputs: what comes out.
        calibrating: samples that calibrate.
        judging: samples that judge fidelity; none of them calibrates.
    """

    flat: FlatModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    calibrating: Samples
    judging: Samples


def prepare(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    calibration: Iterable[Any],
    *,
    batch_size: int | None,
    batch_axis: int | Sequence[int | None],
    calibration_samples: int,
    holdout_samples: int,
) -> Prepared:
    """Run the module, read the calibration data and divide it; for the arguments see ``compile_module``."""
    flat = FlatModule(module, tuple(args), dict(kwargs)).eval()
    inputs, outputs = tensor_specs(flat, batch_axis=batch_axis, batch_size=batch_size)
    samples = collect(calibration, flat.signature, inputs, limit=calibration_samples + holdout_samples)
    calibrating, judging = divide(samples, holdout=holdout_samples, calibrating=calibration_samples)
    require_independent(flat, outputs, samples)
    return Prepared(flat, inputs, outputs, calibrating, judging)


def build_artifact(
    prepared: Prepared,
    folder: Path,
    *,
    precision: str,
    recipe: str,
    min_sqnr_db: float | None,
    module: nn.Module,
    source: Mapping[str, Any],
) -> None:
    """Write the files and the manifest of an artifact for target "onnx" into ``folder``.

    Args:
        prepared: what to compile.
        folder: a new folder.
        precision: "a8w8", "a16w8" or "fp32".
        recipe: "faithful" or "fast".
        min_sqnr_db: the least SQNR in dB; None accepts any.
        module: the user's module, as the manifest names it.
        source: further entries for the manifest's ``source``.

    Raises:
        CompileError: it cannot be exported or quantized.
        FidelityError: an output is below ``min_sqnr_db``.
    """
    flat, inputs, outputs, judging = prepared.flat, prepared.inputs, prepared.outputs, prepared.judging
    roles, report, reached = _build(flat, inputs, outputs, prepared.calibrating, folder, precision, recipe)
    _warn_of_surprises(flat, precision, reached, report)
    if precision != "fp32" and prepared.calibrating.count < FEW_SAMPLES:
        log.warning(
            "Only %d samples calibrate the ranges of %s, and %d judge it. Give %d or more: with few, fidelity was seen "
            "to fall by 10 dB.",
            prepared.calibrating.count,
            type(flat.module).__name__,
            judging.count,
            FEW_SAMPLES + FEW_SAMPLES // 4,
        )
    fidelity = _judge(flat, folder / roles["model"], inputs, outputs, judging)
    if min_sqnr_db is not None:
        from lightning_npu.compile.fidelity import check

        check(fidelity, min_sqnr_db=min_sqnr_db, recipe=report["name"], precision=reached)
    if _save_probe(judging, folder / "probe.npz"):
        roles["probe"] = "probe.npz"
    content = {
        "target": "onnx",
        "precision": reached,
        "recipe": report,
        "inputs": [spec.to_json() for spec in inputs],
        "outputs": [spec.to_json() for spec in outputs],
        "signature": flat.signature.to_json(),
        "structure": flat.structure.to_json(),
        "source": _source(module, source),
        "calibration": {
            "samples": prepared.calibrating.count,
            "holdout_samples": judging.count,
            "sha256": prepared.calibrating.sha256(),
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


def _warn_of_surprises(flat: FlatModule, precision: str, reached: str, report: Mapping[str, Any]) -> None:
    name = type(flat.module).__name__
    if reached != precision:
        warnings.warn(
            f"{precision} was asked for, but the artifact of {name} is {reached}: these operators stay in floating "
            f"point: {dict(report['float_nodes'])}.",
            stacklevel=5,
        )
    if flat.written:
        warnings.warn(
            f"{name} changes its input {', '.join(flat.written)} in place. The compiled module gives the same outputs, "
            "but leaves its inputs as they are.",
            stacklevel=5,
        )


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
        {name: _finite(tensor).numpy() for name, tensor in zip(names, batch, strict=True)}
        for batch in calibrating.batches(fixed or 8)
    )
    report = quantize_onnx(reference, folder / "model.onnx", feeds, recipe=recipe, precision=precision)
    facts = {"name": report.recipe, "export": export_facts, **report.to_json()}
    return {"model": "model.onnx", "reference": reference.name}, facts, report.precision


def _finite(tensor: Tensor) -> Tensor:
    """A mask's -inf as the least number there is, which a softmax makes the same of, and ranges can be taken from."""
    return tensor.clamp_min(torch.finfo(tensor.dtype).min) if tensor.is_floating_point() else tensor


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
    per_sample = sum(t.numel() * t.element_size() for t in judging.tensors) // judging.count
    count = min(_PROBE_SAMPLES, judging.count, _PROBE_BYTES // max(1, per_sample))
    if count == 0:
        return False
    save_samples(judging.spread(count), path)
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
