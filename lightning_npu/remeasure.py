"""Fidelity on this machine, where an artifact was judged on another: INT8 is not the same on every processor."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_npu.errors import ArtifactError, NPUError
from lightning_npu.runtimes.base import open_runtime
from lightning_npu.runtimes.cpu import instruction_set
from lightning_npu.tensor_spec import common_batch

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact, OutputFidelity
    from lightning_npu.runtimes.base import Runtime

log = logging.getLogger(__name__)


def open_measured(
    artifact: Artifact, runtime: str = "auto", *, device_index: int | None = None, **options: Any
) -> Runtime:
    """Open ``artifact`` with :func:`open_runtime` and make sure that its fidelity holds on this machine.

    Raises:
        RuntimeUnavailableError: it cannot run here.
        FidelityError: it runs, but not faithfully enough.
    """
    opened = open_runtime(artifact, runtime, device_index=device_index, **options)
    try:
        remeasure(artifact, opened)
    except BaseException:
        opened.close()
        raise
    log.info("%s runs on %s", artifact.path.name, opened.device)
    return opened


def remeasure(artifact: Artifact, runtime: Runtime, *, always: bool = False) -> Mapping[str, OutputFidelity] | None:
    """Measure the artifact's fidelity through ``runtime`` unless it was measured on this instruction set already.

    The few judging samples in the artifact are run through it and through its FP32 reference.

    Args:
        artifact: a loaded artifact.
        runtime: it, opened on this machine.
        always: measure even where the manifest's figures hold.

    Returns:
        Fidelity per output; None where nothing had to be measured or nothing could be: then a warning says so.

    Raises:
        FidelityError: an output is below the least SQNR that the artifact was compiled for.
    """
    from lightning_npu.compile.fidelity import check, measure
    from lightning_npu.runtimes.onnx import OnnxRuntime

    judged = artifact.manifest["fidelity"]
    here = instruction_set()
    if not always and (runtime.name, here) == (judged["runtime"], judged["instruction_set"]):
        return None
    if "probe" not in artifact.manifest["files"]:
        warnings.warn(
            f"{artifact.path.name}: its fidelity was measured on {judged['instruction_set']} and not on this machine "
            f"({here}), since it holds no samples to measure with. Compile it again here to know.",
            stacklevel=2,
        )
        return None
    reference = OnnxRuntime.open_reference(artifact)
    try:
        fidelity = measure(reference, runtime, [load_probe(artifact)])
    finally:
        reference.close()
    if judged["min_sqnr_db"] is not None:
        check(
            fidelity,
            min_sqnr_db=judged["min_sqnr_db"],
            recipe=artifact.manifest["recipe"]["name"],
            precision=artifact.precision,
        )
    _say_once(artifact.fingerprint, f"{artifact.path.name}: fidelity measured again on {here}: it holds")
    return fidelity


def load_probe(artifact: Artifact) -> list[Tensor]:
    """The artifact's judging samples, one tensor per input.

    Raises:
        ArtifactError: the file does not hold what the manifest says.
    """
    import numpy as np

    path = artifact.file("probe")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tensors = [torch.from_numpy(arrays[spec.name]) for spec in artifact.inputs]
        for spec, tensor in zip(artifact.inputs, tensors, strict=True):
            spec.check(tensor)
        if common_batch(artifact.inputs, tensors) == 0:
            raise ValueError("it holds no samples")
    except Exception as error:  # zip, zlib and NumPy have a dozen ways to say that a file is damaged
        reason = error.what if isinstance(error, NPUError) else f"{type(error).__name__}: {error}"
        raise ArtifactError(
            f"{path} does not hold the artifact's judging samples: {reason.rstrip('.')}.",
            expected="an .npz file with one array per input: "
            + ", ".join(f"'{spec.name}' {spec.describe_shape()}" for spec in artifact.inputs),
            remedy="copy the artifact again, or compile the module again",
        ) from error
    return tensors


@functools.cache
def _say_once(fingerprint: str, text: str) -> None:
    log.info(text)
