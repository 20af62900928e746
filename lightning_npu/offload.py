"""``offload``: the one call that compiles a submodule of a model and puts an ``NPUFrozenModule`` in its place."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from lightning_npu.artifact import MANIFEST, Artifact
from lightning_npu.compile.capture import Call, capture_inputs
from lightning_npu.compile.pipeline import CALIBRATION_SAMPLES, HOLDOUT_SAMPLES, compile_module
from lightning_npu.compile.split import split_module
from lightning_npu.errors import ArtifactError, InputError
from lightning_npu.hashing import state_sha256
from lightning_npu.module import NPUFrozenModule

log = logging.getLogger(__name__)

FOLDER = Path("lightning_npu_artifacts")


def offload(
    model: nn.Module,
    submodule: str,
    *,
    calibration: Iterable[Any],
    cut: str | None = None,
    target: str = "onnx",
    precision: str = "a8w8",
    output: str | Path | None = None,
    runtime: str = "auto",
    calibration_batches: int = 256,
    run: Callable[[nn.Module, Any], Any] | None = None,
    device_index: int | None = None,
    keep_reference: bool = False,
    **options: Any,
) -> NPUFrozenModule:
    """Compile a frozen submodule and swap it in place; the model's own code does not change.

    A few batches are run through the model to see what the submodule is fed. An artifact that is at ``output``
    already is used again if it was made from the same weights, cut and options, and refused if not. Works on a
    finished model as well as inside ``setup`` of a LightningModule or Callback.

    Args:
        model: the model, for example a LightningModule.
        submodule: dotted name of the submodule to offload, such as "encoder" or "policy.model.backbone".
        calibration: loader of the model's own batches, or ready inputs of the submodule; real data.
        cut: dotted name, inside the submodule, of the last part to offload; what follows stays in torch, frozen.
            None offloads all of it.
        target: what to compile for.
        precision: "a8w8", "a16w8" or "fp32".
        output: path of the artifact folder; default: ``lightning_npu_artifacts/`` in the working directory, under a
            name made from the submodule, the cut and the weights.
        runtime: which runtime executes it; "auto" takes the first that can.
        calibration_batches: how many batches are run at most; fewer if they hold enough samples before.
        run: ``run(model, batch)`` for models that are neither called with a batch nor have a ``training_step``.
        device_index: which device, where the runtime has several.
        keep_reference: keep the FP32 head in torch beside the artifact, frozen, for ``Prefetch(balance=...)``.
        **options: further options of :func:`compile_module`: ``recipe``, ``batch_size``, ``min_sqnr_db``, ...; and
            ``allow_residual`` of :func:`split_module`.

    Returns:
        The module that took the submodule's place; the same as before if it was offloaded already.

    Raises:
        InputError: no such submodule, or calibration data that never reaches it.
        CompileError: it cannot be cut, exported or quantized.
        FidelityError: the result is too far from FP32.
        ArtifactError: ``output`` holds an artifact of something else.
    """
    original = find_submodule(model, submodule)
    if isinstance(original, NPUFrozenModule):
        return original
    allow_residual = options.pop("allow_residual", False)
    made_from = {
        "module": f"{type(original).__module__}.{type(original).__qualname__}",
        "cut": cut,
        "target": target,
        "precision": precision,
        "options": {key: repr(value) for key, value in sorted(options.items()) if key != "overwrite"},
    }
    key = _key(made_from, original)
    path = Path(output) if output is not None else FOLDER / f"{submodule}{f'-{cut}' if cut else ''}-{key[:12]}.npu"
    artifact = None if options.get("overwrite") else _existing(path, key)
    head, tail = original, None
    if artifact is None or cut is not None:  # one batch is enough to cut, when nothing has to be compiled
        wanted = options.get("calibration_samples", CALIBRATION_SAMPLES) + options.get(
            "holdout_samples", HOLDOUT_SAMPLES
        )
        calls = capture_inputs(
            model,
            submodule,
            calibration,
            limit_batches=calibration_batches if artifact is None else 1,
            limit_samples=wanted,
            run=run,
        ).calls
        if cut is not None:
            head, tail = split_module(
                original, cut, calls[0].args, example_kwargs=calls[0].kwargs, allow_residual=allow_residual
            )
        if artifact is None:
            source = {"module": made_from["module"], "submodule": submodule, "cut": cut, "key": key}
            artifact = _compile(head, path, calls, target, precision, source, options)
    frozen = NPUFrozenModule(
        artifact, runtime=runtime, device_index=device_index, tail=tail, reference=head if keep_reference else None
    )
    parameter = next(original.parameters(), None)
    if parameter is not None:
        frozen.to(device=parameter.device)
    parent, _, name = submodule.rpartition(".")
    setattr(model.get_submodule(parent), name, frozen)
    log.info("%s of %s now runs as %s (%s)", submodule, type(model).__name__, path, artifact.precision)
    return frozen


def find_submodule(model: nn.Module, name: str) -> nn.Module:
    """The submodule by its dotted name.

    Raises:
        InputError: there is none; the message lists the nearest names.
    """
    import difflib

    try:
        if name:
            return model.get_submodule(name)
    except AttributeError:
        pass
    names = [known for known, _ in model.named_modules() if known]
    raise InputError(
        f"{type(model).__name__} has no submodule '{name}'.",
        expected=f"one of its submodules, such as {difflib.get_close_matches(name, names, n=3) or names[:5]}",
        got=repr(name),
        remedy="call offload after the submodule was built, for example in setup()",
    )


def _key(made_from: dict[str, Any], original: nn.Module) -> str:
    """SHA-256 of everything that decides what the artifact computes, its calibration data aside."""
    text = json.dumps({**made_from, "state": state_sha256(original)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _existing(path: Path, key: str) -> Artifact | None:
    """The artifact at ``path`` if it was made from the same; None if there is none."""
    if not path.exists():
        return None
    artifact = Artifact.load(path)
    if artifact.manifest["source"].get("key") != key:
        raise ArtifactError(
            f"{path} was made from other weights, another cut or other options.",
            expected=f"key {key[:16]}",
            got=f"key {str(artifact.manifest['source'].get('key'))[:16]}",
            remedy="choose another output, delete it, or pass overwrite=True",
        )
    log.info("using %s, which was made from the same weights and options", path / MANIFEST)
    return artifact


def _compile(
    head: nn.Module,
    path: Path,
    calls: list[Call],
    target: str,
    precision: str,
    source: dict[str, Any],
    options: dict[str, Any],
) -> Artifact:
    try:
        return compile_module(
            head,
            calls[0].args,
            example_kwargs=calls[0].kwargs,
            calibration=calls,
            output=path,
            target=target,
            precision=precision,
            source=source,
            **options,
        )
    except ArtifactError:
        artifact = _existing(path, source["key"])  # another process of the same job was faster
        if artifact is None:
            raise
        return artifact
