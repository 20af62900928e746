"""What this machine's processor offers an INT8 runtime: its instruction set and the cores of this process."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Set
from pathlib import Path

# strongest first: the first flag that the processor has names the instruction set
_X86 = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512bw", "avx2", "sse4_1")
_ARM = ("i8mm", "asimddp", "asimd")
_EXACT = {"amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp"}


def _flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> Set[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


@functools.cache
def instruction_set() -> str:
    """The strongest integer instruction set, as ``machine-flag``: "x86_64-avx512_vnni", "aarch64-asimddp".

    Where the operating system does not tell, "machine-unknown", which is treated like the weakest.
    """
    machine = platform.machine().lower()
    flags = _flags()
    for flag in (*_X86, *_ARM):
        if flag in flags:
            return f"{machine}-{flag}"
    return f"{machine}-unknown"


def exact_u8s8(name: str | None = None) -> bool:
    """Whether products of unsigned 8-bit activations and signed 8-bit weights are summed without saturation.

    Without VNNI, x86 processors add pairs of such products in 16 bits (``vpmaddubsw``) and saturate.

    Args:
        name: an instruction set as :func:`instruction_set` names it; default: this machine's.
    """
    return (name or instruction_set()).rpartition("-")[2] in _EXACT


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not on macOS and Windows
        return max(1, os.cpu_count() or 1)
