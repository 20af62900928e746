"""Which machine this is, as the first part of every board's key."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

_NAMELESS = ("", "localhost", "localhost.localdomain")


@functools.cache
def host_id() -> str:
    """The host's name, the same in every process on it.

    A machine that has no name of its own is told from others like it by the kernel's boot id.
    """
    name = socket.gethostname()
    if name not in _NAMELESS:
        return name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return name or "localhost"
    return f"{name or 'localhost'}-{boot[:8]}"
