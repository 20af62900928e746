"""``offload``: the one call that compiles a submodule of a model and puts an ``NPUFrozenModule`` in its place."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightning_npu.artifact import MANIFEST, Artifact
from lightning_npu.compile.capture import Call, capture_inputs
from lightning_npu.compile.options import check_offload_target, check_options
from lightning_npu.compile.pipeline import CALIBRATION_SAMPLES, HOLDOUT_SAMPLES, MIN_SQNR_DB, compile_module
from lightning_npu.compile.reuse import require_same
from lightning_npu.compile.split import split_module
from lightning_npu.errors import ArtifactError, InputError
from lightning_npu.failover import POLICIES
from lightning_npu.forward_gradient.bridge import Bridge
from lightning_npu.hashing import digest, state_sha256, tensor_sha256
from lightning_npu.module import NPUFrozenModule
from lightning_npu.runtimes.base import runtime_class

log = logging.getLogger(__name__)

FOLDER = Path("lightning_npu_artifacts")
_CHECKED = frozenset(inspect.signature(check_options).parameters)
_SAMPLES = {"calibration_samples": CALIBRATION_SAMPLES, "holdout_samples": HOLDOUT_SAMPLES}


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
    on_failure: str = "raise",
    gradient: str | Bridge | None = None,
    **options: Any,
) -> NPUFrozenModule:
    """Compile a frozen submodule and swap it in place; the model's own code does not change.

    A few batches are run through the model to see what the submodule is fed. An artifact that is at ``output``
    already is used again if it was made from the same module, cut and options, computes what the module computes, and
    is still faithful on the data at hand; it is refused if not. Works on a finished model as well as inside ``setup``
    or ``configure_model``; ``load_from_checkpoint`` calls the latter only. Where the submodule is registered under
    several names, all are replaced.

    What has to hold: the submodule is FP32 and deterministic; the model always calls it in one way (one size, the same
    flags); samples are independent along the batch axis (``batch_axis=1`` for modules that take the sequence first).
    Parameters that require grad are frozen from now on. Hooks on the submodule or inside it do not fire afterwards,
    since it is no longer executed. With manual optimization only the first call of the submodule in each
    ``training_step`` is recorded, and a warning says so; pass ``run=`` if there are more.

    Args:
        model: the model, for example a LightningModule.
        submodule: dotted name of the submodule to offload, such as "encoder" or "policy.model.backbone".
        calibration: loader of the model's own batches, or ready inputs of the submodule; real data.
        cut: dotted name, inside the submodule, of the last part to offload; what follows stays in torch, frozen.
            None offloads all of it.
        target: what to compile for: "onnx" or "mobilint". Without the vendor's compiler the latter writes a compile
            kit and raises ``CompilerMissingError``; the model is as before, and once the kit's artifact is at
            ``output``, the same call takes it.
        precision: "a8w8", "a16w8" or "fp32".
        output: path of the artifact folder; default: ``lightning_npu_artifacts/`` in the working directory, under a
            name made from the submodule, the cut and the weights.
        runtime: which runtime executes it; "auto" takes the first that can.
        calibration_batches: how many batches are run at most; fewer if they hold enough samples before.
        run: ``run(model, batch)`` for models that are neither called with a batch nor have a ``training_step``.
        device_index: which device, where the runtime has several.
        keep_reference: keep the FP32 head in torch beside the artifact, frozen, for ``Prefetch(balance=...)``.
        on_failure: "raise", or "reference": keep the FP32 head too, and let it take over when the device fails.
        gradient: "forward" or a :class:`forward_gradient.Bridge`: what lies before the submodule can be trained, by an
            estimate of the gradient from further forward calls.
        **options: further options of :func:`compile_module`: ``recipe``, ``batch_size``, ``min_sqnr_db``, ...; and
            ``allow_residual`` of :func:`split_module`.

    Returns:
        The module that took the submodule's place; the same as before if it was offloaded already.

    Raises:
        InputError: no such submodule, calibration data that never reaches it, or it was offloaded in another way.
        CompileError: it cannot be cut, exported or quantized; or the target's compiler is not here.
        FidelityError: the result is too far from FP32.
        ArtifactError: ``output`` holds an artifact of something else.
    """
    original = find_submodule(model, submodule)
    if isinstance(original, NPUFrozenModule):
        wanted_now = {"cut": cut, "target": target, "precision": precision, **_recipe_options(options)}
        kept = {"keep_reference": keep_reference or on_failure == "reference", "gradient": gradient is not None}
        _require_offloaded_so(original, submodule, wanted_now, kept, output)
        return original
    if on_failure not in POLICIES:
        raise InputError("on_failure is wrong.", expected=f"one of {POLICIES}", got=repr(on_failure))
    Bridge.of(gradient)  # wrong options are told before the work of compiling
    checked = {name: value for name, value in options.items() if name in _CHECKED}
    check_options(target=target, precision=precision, **checked)
    check_offload_target(target, options.get("target_options"))
    if runtime != "auto":
        runtime_class(runtime)  # a wrong name is told before the work of compiling
    allow_residual = options.pop("allow_residual", False)
    made_from = _made_from(original, cut, target, precision, options)
    name = f"{submodule}{f'-{cut}' if cut else ''}-{_short(made_from)}.npu"
    path = FOLDER / name if output is None else Path(output)
    artifact = None if options.get("overwrite") else _existing(path, made_from)
    reused = artifact is not None
    wanted = [options.get(key, default) for key, default in _SAMPLES.items()]
    calls = capture_inputs(
        model,
        submodule,
        calibration,
        limit_batches=calibration_batches if artifact is None else 1,
        limit_samples=sum(wanted),
        run=run,
    ).calls
    head, tail = original, None
    if cut is not None:
        head, tail = split_module(
            original, cut, calls[0].args, example_kwargs=calls[0].kwargs, allow_residual=allow_residual
        )
    if artifact is None:
        source = {"module": made_from["module"], "submodule": submodule, "cut": cut, "made_from": made_from}
        artifact = _compile(head, path, calls, target, precision, source, options)
    else:
        require_same(artifact, head, calls[0], min_sqnr_db=options.get("min_sqnr_db", MIN_SQNR_DB))
    frozen = NPUFrozenModule(
        artifact,
        runtime=runtime,
        device_index=device_index,
        tail=tail,
        reference=head if keep_reference or on_failure == "reference" else None,
        on_failure=on_failure,
        gradient=gradient,
    )
    parameter = next(original.parameters(), None)
    if parameter is not None:
        frozen.to(device=parameter.device)
    for parent in list(model.modules()):  # the same module may be registered under several names
        for child in [child for child, module in parent._modules.items() if module is original]:
            setattr(parent, child, frozen)
    how = "used again" if reused else "compiled"
    worst = min((figures.sqnr_db for figures in artifact.fidelity.values()), default=None)
    fidelity = "" if worst is None else f", lowest SQNR {worst:.1f} dB"
    _say(f"{submodule} of {type(model).__name__} now runs as {path} ({artifact.precision}, {how}{fidelity})")
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


def _made_from(
    original: nn.Module, cut: str | None, target: str, precision: str, options: dict[str, Any]
) -> dict[str, Any]:
    """What decides the artifact, its calibration data aside: JSON-ready, so that a difference can be named."""
    hidden = {  # buffers that no state dict holds, such as position tables
        name: tensor_sha256(buffer) for name, buffer in original.named_buffers() if name not in original.state_dict()
    }
    return {
        "module": f"{type(original).__module__}.{type(original).__qualname__}",
        "structure": hashlib.sha256(repr(original).encode()).hexdigest(),
        "weights": digest({**state_sha256(original), **hidden}),
        "cut": cut,
        "target": target,
        "precision": precision,
        **_recipe_options(options),
    }


def _recipe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = inspect.signature(compile_module).parameters
    return {
        **{key: repr(options.get(key, defaults[key].default)) for key in ("recipe", "batch_size", "batch_axis")},
        **({"target_options": repr(options["target_options"])} if options.get("target_options") else {}),
    }


def _require_offloaded_so(
    frozen: NPUFrozenModule,
    name: str,
    wanted: dict[str, Any],
    kept: dict[str, bool],
    output: str | Path | None,
) -> None:
    """Refuse a second call that asks for something else than the first one made: the original is gone by now."""
    made_from = {} if frozen.artifact is None else frozen.artifact.manifest["source"].get("made_from", {})
    found = {key: made_from.get(key) for key in wanted} if made_from else dict(wanted)
    found |= {"keep_reference": frozen.reference is not None, "gradient": frozen.differentiable}
    asked: dict[str, Any] = {**wanted, **kept}
    if output is not None and frozen.artifact is not None:
        asked["output"], found["output"] = str(Path(output).resolve()), str(frozen.artifact.path.resolve())
    # what is there and was not asked for this time does no harm
    different = [key for key, value in asked.items() if found[key] != value and not (key in kept and not value)]
    if different:
        raise InputError(
            f"'{name}' is offloaded already, in another way: {', '.join(different)}.",
            expected={key: found[key] for key in different},
            got={key: asked[key] for key in different},
            remedy="offload a new model; of this one the original module is gone",
        )


def _say(text: str) -> None:
    """Where Lightning speaks, in its voice, which is shown by default; else in the log."""
    if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
        from lightning_npu._lightning import pl

        pl.utilities.rank_zero_info(text)
    else:
        log.info(text)


def _short(made_from: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]


def _existing(path: Path, made_from: dict[str, Any]) -> Artifact | None:
    """The artifact at ``path`` if it was made from the same; None if there is none."""
    if not path.exists():
        return None
    artifact = Artifact.load(path)
    found = artifact.manifest["source"].get("made_from", {})
    different = [key for key, value in made_from.items() if found.get(key) != value]
    if not found:
        raise ArtifactError(
            f"{path} was made by compile_module, which does not note what of: whether it is the same cannot be told.",
            remedy="put it in by hand, NPUFrozenModule(path, tail=...), or choose another output",
        )
    if different:
        raise ArtifactError(
            f"{path} was made from something else: {', '.join(different)} differ{'s' * (len(different) == 1)}.",
            expected={key: made_from[key] for key in different},
            got={key: found.get(key) for key in different},
            remedy="choose another output, delete it, or pass overwrite=True",
        )
    log.info("using %s, which was made from the same module and options", path / MANIFEST)
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
        artifact = _existing(path, source["made_from"])  # another process of the same job was faster
        if artifact is None or options.get("overwrite"):
            raise
        return artifact
