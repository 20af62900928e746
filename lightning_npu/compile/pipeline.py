"""``compile_module``: the steps from a module to an artifact, in order; each step has a module of its own."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_npu.artifact import Artifact, new_folder, write_manifest
from lightning_npu.compile.eligible import require_eligible
from lightning_npu.compile.flat import FlatModule, resize_batch, tensor_specs
from lightning_npu.compile.independence import require_independent
from lightning_npu.compile.options import check_options
from lightning_npu.compile.samples import Samples, collect, divide
from lightning_npu.compile.undisturbed import undisturbed
from lightning_npu.errors import CompileError
from lightning_npu.hashing import state_sha256
from lightning_npu.runtimes.base import Runtime
from lightning_npu.runtimes.cpu import instruction_set

if TYPE_CHECKING:
    from lightning_npu.artifact import OutputFidelity
    from lightning_npu.tensor_spec import TensorSpec

log = logging.getLogger(__name__)

CALIBRATION_SAMPLES, HOLDOUT_SAMPLES, MIN_SQNR_DB = 128, 32, 20.0
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
    min_sqnr_db: float | None = MIN_SQNR_DB,
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
        min_sqnr_db: the least SQNR in dB that every output must reach, and, less 17 dB, what varies between samples
            in it (see :func:`lightning_npu.compile.fidelity.check`); None accepts any.
        overwrite: replace an artifact that is at ``output`` already.
        source: further entries for the manifest's ``source``: ``submodule``, ``cut``.

    Returns:
        The artifact, loaded.

    Raises:
        InputError: bad example inputs, calibration data or options.
        CompileError: the module cannot be exported or quantized, or mixes samples along the batch axis.
        FidelityError: an output is below ``min_sqnr_db``.
        ArtifactError: ``output`` exists.
    """
    check_options(
        target=target,
        precision=precision,
        recipe=recipe,
        batch_size=batch_size,
        calibration_samples=calibration_samples,
        holdout_samples=holdout_samples,
        min_sqnr_db=min_sqnr_db,
    )
    require_eligible(module)
    _say_what_freezes(module)
    output = Path(output)
    # without fused kernels, also where it is compared: they zero what a padding mask hides, which ONNX does not
    with undisturbed(module, fused_attention=False), new_folder(output, overwrite=overwrite) as folder:
        flat = FlatModule(module, tuple(example_inputs), dict(example_kwargs or {})).eval()
        inputs, outputs = tensor_specs(flat, batch_axis=batch_axis, batch_size=batch_size)
        samples = collect(calibration, flat.signature, inputs, limit=calibration_samples + holdout_samples)
        calibrating, judging = divide(samples, holdout=holdout_samples, calibrating=calibration_samples)
        require_independent(flat, outputs, samples)
        roles, report, reached = _build(flat, inputs, outputs, calibrating, folder, precision, recipe)
        _warn_of_surprises(flat, precision, reached, report)
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


def _say_what_freezes(module: nn.Module) -> None:
    trained = sum(parameter.requires_grad for parameter in module.parameters())
    if trained:
        log.warning(
            "%d parameters of %s require grad: the artifact holds them as they are now, frozen from now on where it "
            "stands for the module.",
            trained,
            type(module).__name__,
        )


def _warn_of_surprises(flat: FlatModule, precision: str, reached: str, report: Mapping[str, Any]) -> None:
    name = type(flat.module).__name__
    if reached != precision:
        warnings.warn(
            f"{precision} was asked for, but the artifact of {name} is {reached}: these operators stay in floating "
            f"point: {dict(report['float_nodes'])}.",
            stacklevel=3,
        )
    if flat.written:
        warnings.warn(
            f"{name} changes its input {', '.join(flat.written)} in place. The compiled module gives the same outputs, "
            "but leaves its inputs as they are.",
            stacklevel=3,
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
    import numpy as np

    per_sample = sum(t.numel() * t.element_size() for t in judging.tensors) // judging.count
    count = min(_PROBE_SAMPLES, judging.count, _PROBE_BYTES // max(1, per_sample))
    if count == 0:
        return False
    part = judging.spread(count)
    with zipfile.ZipFile(path, "w") as archive:  # np.savez takes no input that is called "file"
        for spec, tensor in zip(part.specs, part.tensors, strict=True):
            with archive.open(f"{spec.name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, tensor.contiguous().numpy(), allow_pickle=False)
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
