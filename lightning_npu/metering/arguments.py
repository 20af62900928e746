"""What users pass to an ``EnergyMeter``, checked where it is written."""

from __future__ import annotations

from typing import Any

from lightning_npu import keys
from lightning_npu.errors import InputError
from lightning_npu.metering.recorder import LONGEST_S
from lightning_npu.power.calibration import number
from lightning_npu.prefetch import Prefetch


def check(*, rolling_s: float, sync: str, prefix: str, samples: Any, over_energy: Any) -> None:
    """Refuse what cannot be; arguments as of ``EnergyMeter``.

    Raises:
        InputError: a value of the wrong kind.
    """
    if sync not in ("epoch", "step", "never"):
        raise InputError("sync is wrong.", expected="'epoch', 'step' or 'never'", got=repr(sync))
    if not 0 < number("rolling_s", rolling_s) <= LONGEST_S / 2:
        raise InputError(
            "rolling_s is wrong.",
            expected=f"seconds above 0, up to {LONGEST_S / 2:g}",
            got=rolling_s,
            remedy="for longer spans there are the figures of epochs, and windows of EnergyMeter.monitor",
        )
    if not isinstance(prefix, str) or prefix.startswith(keys.NPU_PREFIX):
        raise InputError("prefix is wrong.", expected=f"text that does not begin with '{keys.NPU_PREFIX}'", got=prefix)
    if not callable(samples):
        raise InputError("samples is wrong.", expected="a function from a batch to a number", got=repr(samples))
    names = (over_energy,) if isinstance(over_energy, str) else over_energy
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InputError("over_energy is wrong.", expected="a list of keys of metrics; [] for none", got=over_energy)


def whole(count: Any) -> int:
    """What ``samples`` gave for a batch.

    Raises:
        InputError: it is no number of samples.
    """
    try:
        found = float(count)
    except (TypeError, ValueError, RuntimeError):  # the last one is torch's, of a tensor with several numbers
        found = -1.0
    if found < 0 or not found.is_integer():
        raise InputError(
            "EnergyMeter's samples(batch) gave no number of samples.",
            expected="a whole number from 0 on",
            got=repr(count),
            remedy="correct the function that was passed as EnergyMeter(samples=...)",
        )
    return int(found)


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
