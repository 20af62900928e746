"""What can be chosen for target "mobilint", and what a build may be called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from lightning_npu.errors import CompileError, InputError

CORE_MODES = ("single", "global4", "global8", "all")
_ACTIVATIONS = {
    "a8w8": {"query": 8, "key": 8, "value": 8, "output": 8, "head": 8, "ffn": 8},
    # what the vendor's compiler does with a Transformer by itself
    "a16w8": {"query": 8, "key": 8, "value": 8, "output": 16, "head": 8, "ffn": 16},
}
_WEIGHTS = {"query": 8, "key": 8, "value": 8, "output": 8, "head": 8, "ffn": 8}
CALIBRATION: Mapping[str, Any] = {
    "method": 1,
    "output": 1,
    "mode": 1,
    "max_percentile": {"percentile": 0.9999, "topk_ratio": 0.01},
}


@dataclass(frozen=True)
class MobilintOptions:
    """Options of target "mobilint", given as ``target_options``.

    Attributes:
        core_mode: the core mode that the MXQ is compiled for: "single" (each core computes an image), "global4",
            "global8", or "all": any of them can be chosen when it is opened, for a longer compilation.
        score_bits: bits of the products of queries and keys, before the softmax: 8, or 16 where 8 lose what attention
            looks at. With 16 the build is called "mixed".
        normalize: ``{"mean": [...], "std": [...]}`` per channel: the artifact then takes raw frames, uint8 from 0 to
            255, and computes ``(x / 255 - mean) / std`` before the module. None: it takes what the module takes.
        fidelity: whether fidelity must be measured on the board before there is an artifact. False keeps an artifact
            that says "unmeasured"; it is measured when it is first opened.
    """

    core_mode: str = "single"
    score_bits: int = 8
    normalize: Mapping[str, Any] | None = None
    fidelity: bool = True

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any] | None) -> MobilintOptions:
        """Check what a user gave.

        Raises:
            InputError: an option that there is not, or a value that it does not take.
        """
        given = {} if given is None else given
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise InputError(
                "Target 'mobilint' has no such options.",
                expected=f"of {known}",
                got=unknown,
                remedy="check the spelling",
            )
        made = cls(**given)
        if made.core_mode not in CORE_MODES:
            raise InputError("core_mode is wrong.", expected=f"one of {list(CORE_MODES)}", got=repr(made.core_mode))
        if made.score_bits not in (8, 16) or isinstance(made.score_bits, bool):
            raise InputError("score_bits is wrong.", expected="8 or 16", got=repr(made.score_bits))
        if not isinstance(made.fidelity, bool):
            raise InputError("fidelity is wrong.", expected="True or False", got=repr(made.fidelity))
        if made.normalize is not None:
            _check_normalize(made.normalize)
        return made


def _check_normalize(value: Any) -> None:
    right = isinstance(value, Mapping) and set(value) == {"mean", "std"}
    lists = [value[key] for key in ("mean", "std")] if right else []
    right = right and all(isinstance(item, (list, tuple)) and item and all(map(_is_number, item)) for item in lists)
    if not right or len(lists[0]) != len(lists[1]) or min(lists[1]) <= 0:
        raise InputError(
            "normalize is wrong.",
            expected="{'mean': [...], 'std': [...]}, one finite number per channel each, standard deviations above 0",
            got=repr(value)[:200],
            remedy="give the figures by which the images are normalised now, for pixels in 0 .. 1",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def bits_for(precision: str, attentions: int) -> dict[str, dict[str, int]]:
    """Bits per kind of layer that the compiler is told.

    Raises:
        CompileError: the vendor's compiler has no such precision, or the head has nothing that it applies to.
    """
    if precision not in _ACTIVATIONS:
        raise CompileError(
            f"Target 'mobilint' has no precision '{precision}'.",
            expected=f"one of {list(_ACTIVATIONS)}",
            remedy="for FP32 use target='onnx'",
        )
    if precision == "a16w8" and not attentions:
        raise CompileError(
            "This head has no attention, and the vendor's compiler gives 16 bits to Transformer layers only.",
            expected="precision='a8w8'",
            got="precision='a16w8'",
        )
    return {"activation": dict(_ACTIVATIONS[precision]), "weight": dict(_WEIGHTS)}


def precision_of(bits: Mapping[str, Any], attentions: int) -> str:
    """What a build with these bits may be called: "a8w8" only if nothing at all is wider.

    Convolutions always have 8 bits, so that a Transformer's 16-bit activations make the whole "mixed".
    """
    weights_are_8 = all(value == 8 for value in bits["weight"].values())
    activations_are_8 = all(value == 8 for value in bits["activation"].values()) and not bits["score_layers"]
    return "a8w8" if weights_are_8 and (activations_are_8 or not attentions) else "mixed"
