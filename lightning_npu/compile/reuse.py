"""Whether an artifact that is there already computes what a module computes, on the data at hand."""

from __future__ import annotations

import torch
from torch import nn

from lightning_npu.artifact import Artifact
from lightning_npu.compile.capture import Call
from lightning_npu.compile.fidelity import check, compare
from lightning_npu.compile.flat import FlatModule, resize_batch
from lightning_npu.compile.undisturbed import undisturbed
from lightning_npu.errors import ArtifactError, FidelityError, InputError
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import common_batch

_SAME_DB = 60.0  # FP32 by two libraries differs by less; another activation or stride by far more


def require_same(artifact: Artifact, module: nn.Module, call: Call, *, min_sqnr_db: float | None) -> None:
    """Run one captured batch through the module and through the artifact's two models.

    Args:
        artifact: the artifact to use again.
        module: the FP32 module that it should stand for.
        call: one call of the module.
        min_sqnr_db: the least SQNR in dB of every output; None accepts any.

    Raises:
        ArtifactError: the FP32 reference computes something else, or takes other inputs.
        FidelityError: the compiled model is not faithful on this batch.
    """
    remedy = "choose another output, delete it, or pass overwrite=True"
    axes = [spec.batch_axis for spec in artifact.inputs]
    fixed = next((spec.static_batch for spec in artifact.inputs if spec.static_batch is not None), None)
    with undisturbed(module, fused_attention=False), torch.no_grad():
        flat = FlatModule(module, call.args, call.kwargs).eval()
        example = flat.example
        if fixed is not None and len(example) == len(axes):
            example = resize_batch(example, axes, fixed)
        expected = [tensor.detach().cpu() for tensor in flat(*example)]
    try:
        for spec, tensor in zip(artifact.inputs, example, strict=True):
            spec.check(tensor)
        common_batch(artifact.inputs, example)
    except (InputError, ValueError) as error:
        raise ArtifactError(f"{artifact.path} was made for other inputs: {error}", remedy=remedy) from error
    inputs = [t.cpu().to(spec.torch_dtype).contiguous() for spec, t in zip(artifact.inputs, example, strict=True)]
    figures = {}
    for role in ("reference", "model"):
        runtime = OnnxRuntime(artifact.file(role), artifact.inputs, artifact.outputs)
        try:
            results = runtime.run(inputs)
        finally:
            runtime.close()
        shapes = [list(t.shape) for t in expected], [list(t.shape) for t in results]
        if shapes[0] != shapes[1]:
            raise ArtifactError(
                f"{artifact.path} gives other shapes.", expected=shapes[0], got=shapes[1], remedy=remedy
            )
        figures[role] = {
            spec.name: compare(a, b) for spec, a, b in zip(artifact.outputs, expected, results, strict=True)
        }
    worst = min(figures["reference"].items(), key=lambda pair: pair[1].sqnr_db)
    if worst[1].sqnr_db < _SAME_DB:
        raise ArtifactError(
            f"{artifact.path} computes something else than the module, though its weights and options are the same: "
            "its code or what it was fed when it was compiled differs.",
            expected=f"{_SAME_DB:g} dB or more between the module and the artifact's FP32 reference",
            got=f"{worst[1].sqnr_db:.1f} dB in output '{worst[0]}'",
            remedy=remedy,
        )
    if min_sqnr_db is not None:
        recipe = artifact.manifest["recipe"]["name"]
        try:
            check(figures["model"], min_sqnr_db=min_sqnr_db, recipe=recipe, precision=artifact.precision)
        except FidelityError as error:
            raise FidelityError(
                f"{artifact.path} was calibrated on other data: {error.what}",
                expected=error.expected,
                got=error.got,
                remedy="pass overwrite=True to calibrate it again on this data",
            ) from error
