"""What users pass to an ``EnergyMeter``, checked where it is written."""

from __future__ import annotations

from typing import Any

from lightning_npu import keys
from lightning_npu.errors import InputError
from lightning_npu.power.calibration import number
from lightning_npu.prefetch import Prefetch


def check(*, rolling_s: float, sync: str, prefix: str, samples: Any) -> None:
    """Refuse what cannot be; arguments as of ``EnergyMeter``.

    Raises:
        InputError: a value of the wrong kind.
    """
    if sync not in ("epoch", "step", "never"):
        raise InputError("sync is wrong.", expected="'epoch', 'step' or 'never'", got=repr(sync))
    if number("rolling_s", rolling_s) <= 0:
        raise InputError("rolling_s is wrong.", expected="seconds above 0", got=rolling_s)
    if not isinstance(prefix, str) or prefix.startswith(keys.NPU_PREFIX):
        raise InputError("prefix is wrong.", expected=f"text that does not begin with '{keys.NPU_PREFIX}'", got=prefix)
    if not callable(samples):
        raise InputError("samples is wrong.", expected="a function from a batch to a number", got=repr(samples))


def own_prefetch(wanted: bool | int | str | Prefetch) -> Prefetch | None:
    """The look-ahead that a meter owns unless the trainer has one.

    Raises:
        InputError: a value of the wrong kind.
    """
    if isinstance(wanted, Prefetch):
        return wanted
    if wanted is True:
        raise InputError("prefetch is wrong.", expected="'auto', a depth, a Prefetch, or False", got=True)
    return None if wanted is False else Prefetch(wanted)
