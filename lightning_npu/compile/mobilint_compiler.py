"""The vendor's compiler: whether it is here, and running it in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lightning_npu.compile.mobilint_script import MODULES
from lightning_npu.errors import CompileError

_TAIL = 20  # lines


def installed_compiler() -> str | None:
    """Name and version of the vendor's compiler in this environment, such as "qbcompiler 1.3.0"; None without one.

    Nothing is imported: the compiler loads torch and its own libraries. That a module of this name really is the
    vendor's is seen when it is called.
    """
    for name in MODULES:
        try:
            found = find_spec(name)
        except (ImportError, ValueError):  # a broken entry in sys.modules
            found = None
        if found is None:
            continue
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} of unknown version"
    return None


def run_script(kit: Path) -> Path:
    """Run a kit's compile.py with this interpreter; gives the MXQ file.

    In another process: the compiler prints, keeps gigabytes, and ends the process on some of its failures.

    Raises:
        CompileError: it failed; the message ends with the last lines that it printed.
    """
    done = subprocess.run(
        [sys.executable, str(kit / "compile.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    made = kit / "model.mxq"
    if done.returncode != 0 or not made.is_file():
        lines = done.stdout.strip().splitlines()[-_TAIL:]
        raise CompileError(
            f"The vendor's compiler failed on {kit} (exit status {done.returncode}).",
            got="\n    ".join(["its last lines:", *lines]),
            remedy=f"the kit is still there: change what it complains about and run python {kit / 'compile.py'}, "
            "or run it in the vendor's container, as the kit's README.md says",
        )
    return made
