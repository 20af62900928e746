"""The options of ``compile_module``, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from lightning_npu.compile.mobilint_options import MobilintOptions
from lightning_npu.errors import CompileError, InputError

TARGETS = ("onnx", "mobilint")
PRECISIONS = ("a8w8", "a16w8", "fp32")


def check_options(
    *,
    target: Any = TARGETS[0],
    precision: Any = PRECISIONS[0],
    recipe: Any = "faithful",
    batch_size: Any = None,
    calibration_samples: Any = 1,
    holdout_samples: Any = 1,
    min_sqnr_db: Any = None,
) -> None:
    """Refuse options of the wrong type or range; for what each means see ``compile_module``.

    Raises:
        CompileError: there is no such target, precision or recipe.
        InputError: a number is none, or is out of its range.
    """
    from lightning_npu.compile.quantize import RECIPES  # it imports onnx

    choices = {"target": (target, TARGETS), "precision": (precision, PRECISIONS), "recipe": (recipe, RECIPES)}
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            raise CompileError(f"There is no {option} '{value}'.", expected=f"one of {list(allowed)}", got=repr(value))
    if batch_size is not None:
        _require_count("batch_size", batch_size, "None or a positive whole number")
    _require_count("calibration_samples", calibration_samples, "a positive whole number; 100 or more are good")
    _require_count(
        "holdout_samples", holdout_samples, "a positive whole number: fidelity is judged on held-out samples"
    )
    if min_sqnr_db is None:
        return
    if isinstance(min_sqnr_db, bool) or not isinstance(min_sqnr_db, Real) or not math.isfinite(min_sqnr_db):
        raise InputError(
            "min_sqnr_db is not a finite number.",
            expected="decibels, such as 20.0; None to accept any fidelity",
            got=repr(min_sqnr_db),
        )


def check_target(target: str, given: Mapping[str, Any] | None) -> MobilintOptions | None:
    """The options of target "mobilint"; None for target "onnx", which has none.

    Raises:
        InputError: options that the target does not have, or wrong values.
    """
    if target == "mobilint":
        return MobilintOptions.from_mapping(given)
    if given:
        raise InputError(
            f"Target '{target}' has no options.",
            expected="target_options=None",
            got=repr(given)[:200],
            remedy="leave target_options out, or say target='mobilint'",
        )
    return None


def check_offload_target(target: str, given: Mapping[str, Any] | None) -> None:
    """As :func:`check_target`, for a submodule that the model goes on calling as before.

    Raises:
        InputError: also where what the submodule takes would change.
    """
    options = check_target(target, given)
    if options is not None and options.normalize is not None:
        raise InputError(
            "normalize changes what the submodule takes, and the model would go on giving it normalised images.",
            expected="target_options without 'normalize'",
            remedy="let the submodule itself take uint8 frames and normalise them first: that is recognised; or "
            "compile by hand with compile_module and give NPUFrozenModule the frames",
        )


def _require_count(option: str, value: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{option} must be at least 1.", expected=expected, got=repr(value))
