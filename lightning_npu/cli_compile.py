"""What ``lightning-npu compile`` does: a module to an artifact or a compile kit, or a kit's MXQ to an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_npu.artifact import Artifact
from lightning_npu.errors import InputError

_MOBILINT = ("core_mode", "score_bits", "mean", "std", "no_fidelity")


def compile_module_named(
    name: str | None, calibration: str | None, output: Path, overwrite: bool, options: Mapping[str, Any]
) -> Artifact:
    """Compile the module that ``name`` names.

    Args:
        name: MODULE:NAME.
        calibration: file or MODULE:NAME.
        output: the artifact folder.
        overwrite: replace what is there.
        options: the command's other options.

    Raises:
        InputError: one of the two is missing, or options do not fit the target.
    """
    from lightning_npu.cli_data import build_module, calibration_batches, example
    from lightning_npu.compile import compile_module
    from lightning_npu.compile.split import split_module

    for value, what in ((name, "MODULE:NAME"), (calibration, "--calibration")):
        if value is None:
            raise InputError(
                f"{what} is missing.",
                expected="lightning-npu compile MODULE:NAME --calibration DATA -o ARTIFACT",
                remedy="give both, or --finish KIT/model.mxq",
            )
    target_options = _target_options(options)
    built = build_module(str(name))
    first, batches = calibration_batches(str(calibration))
    args, kwargs = example(first)
    cut = options["cut"]
    head = built if cut is None else split_module(built, cut, args, example_kwargs=kwargs)[0]
    return compile_module(
        head,
        args,
        example_kwargs=kwargs,
        calibration=batches,
        output=output,
        target=options["target"],
        precision=options["precision"],
        recipe=options["recipe"],
        batch_size=options["batch_size"],
        min_sqnr_db=options["min_sqnr_db"],
        overwrite=overwrite,
        source={"cut": cut},
        target_options=target_options,
    )


def finish_kit(
    mxq: Path, name: str | None, calibration: str | None, output: Path, overwrite: bool, options: Mapping[str, Any]
) -> Artifact:
    """Make an artifact of a kit's MXQ.

    Raises:
        InputError: a module or calibration data were given: the kit holds both.
    """
    from lightning_npu.compile.mobilint_finish import finish

    given = [what for value, what in ((name, "MODULE:NAME"), (calibration, "--calibration")) if value is not None]
    if given:
        raise InputError(
            "--finish takes the head and its data from the kit.", got=" and ".join(given), remedy="leave them out"
        )
    return finish(mxq, output, fidelity=False if options["no_fidelity"] else None, overwrite=overwrite)


def _target_options(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was said for target "mobilint"; None where nothing was."""
    given = [key for key in _MOBILINT if options[key]]
    if options["target"] != "mobilint":
        if given:
            raise InputError(
                f"Target '{options['target']}' has no such options.",
                got=", ".join(f"--{key.replace('_', '-')}" for key in given),
                remedy="leave them out, or say --target mobilint",
            )
        return None
    chosen: dict[str, Any] = {"fidelity": not options["no_fidelity"]}
    if options["core_mode"]:
        chosen["core_mode"] = options["core_mode"]
    if options["score_bits"]:
        chosen["score_bits"] = int(options["score_bits"])
    if options["mean"] or options["std"]:
        chosen["normalize"] = {key: _numbers(key, options[key]) for key in ("mean", "std")}
    return chosen


def _numbers(option: str, text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",")]
    except ValueError:
        raise InputError(
            f"--{option} is no list of numbers.",
            expected="one number per channel, as in 0.485,0.456,0.406",
            got=repr(text),
            remedy="give both --mean and --std",
        ) from None
