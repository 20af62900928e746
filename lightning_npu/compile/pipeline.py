"""``compile_module``: the steps from a module to an artifact, in order; each step has a module of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_npu.artifact import Artifact, new_folder
from lightning_npu.compile.build import Prepared, build_artifact, prepare
from lightning_npu.compile.eligible import require_eligible
from lightning_npu.compile.options import check_options, check_target
from lightning_npu.compile.quiet import root_logger_kept
from lightning_npu.compile.undisturbed import undisturbed

log = logging.getLogger(__name__)

CALIBRATION_SAMPLES, HOLDOUT_SAMPLES, MIN_SQNR_DB = 128, 32, 20.0


@root_logger_kept()
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
    target_options: Mapping[str, Any] | None = None,
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
        target: what it is compiled for: "onnx", the embedded default, or "mobilint". Where the vendor's compiler is not
            installed, the latter writes a compile kit beside ``output`` and raises :class:`CompilerMissingError`, which
            says how to go on; see docs/mobilint.md.
        precision: "a8w8" (8-bit activations and weights), "a16w8", or "fp32" (target "onnx").
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
        target_options: options of the target; for "mobilint" those of
            :class:`lightning_npu.compile.mobilint_options.MobilintOptions`.

    Returns:
        The artifact, loaded.

    Raises:
        InputError: bad example inputs, calibration data or options.
        CompileError: the module cannot be exported or quantized, or mixes samples along the batch axis.
        FidelityError: an output is below ``min_sqnr_db``.
        ArtifactError: ``output`` exists.
        CompilerMissingError: the target's compiler is not here; what it needs was written.
        RuntimeUnavailableError: the target's device is not here to measure fidelity on.
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
    options = check_target(target, target_options)
    require_eligible(module)
    _say_what_freezes(module)
    output = Path(output)
    given = source or {}

    def prepared(taken: nn.Module) -> Prepared:
        return prepare(
            taken,
            example_inputs,
            example_kwargs or {},
            calibration,
            batch_size=batch_size,
            batch_axis=batch_axis,
            calibration_samples=calibration_samples,
            holdout_samples=holdout_samples,
        )

    def build(made: Prepared, folder: Path) -> None:
        build_artifact(
            made, folder, precision=precision, recipe=recipe, min_sqnr_db=min_sqnr_db, module=module, source=given
        )

    # without fused kernels, also where it is compared: they zero what a padding mask hides, which ONNX does not
    if options is not None:
        from lightning_npu.compile.mobilint import compile_for_mobilint

        with undisturbed(module, fused_attention=False):
            kit = compile_for_mobilint(
                module, prepared, build, output, options, precision=precision, overwrite=overwrite
            )
        return kit
    with undisturbed(module, fused_attention=False), new_folder(output, overwrite=overwrite) as folder:
        build(prepared(module), folder)
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
