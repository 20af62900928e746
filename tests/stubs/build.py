"""Compile the stub libraries once per version of their source, into a private folder below the temporary one."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
# folder -> (source, library, extra arguments)
LIBRARIES = {
    "nvml": ("nvml_stub.c", "libnvidia-ml.so.1", ["-Wl,-soname,libnvidia-ml.so.1"]),
    "mbltml-0.0.0": ("mbltml_stub.c", "libmbltml.so.0.0.0", ["-DMBLTML_FORM=0"]),
    "mbltml-1.5.0": ("mbltml_stub.c", "libmbltml.so.1.5.0", ["-DMBLTML_FORM=1"]),
}


def compiler() -> str | None:
    """The C compiler, or None where the machine has none."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _folder() -> Path:
    digest = hashlib.sha256()
    for name in ("trace_model.h", *sorted({source for source, _, _ in LIBRARIES.values()})):
        digest.update((HERE / name).read_bytes())
    base = Path(tempfile.gettempdir()) / f"lightning-npu-stubs-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise PermissionError(f"{base} belongs to another user")
    return base / digest.hexdigest()[:16]


@functools.cache
def library(name: str) -> Path:
    """The compiled library of folder ``name``, such as "nvml".

    Raises:
        FileNotFoundError: there is no C compiler.
        RuntimeError: it does not compile; the message is the compiler's.
    """
    source, file, arguments = LIBRARIES[name]
    path = _folder() / name / file
    if path.exists():
        return path
    cc = compiler()
    if cc is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) to build the stub driver libraries with")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / file
        command = [cc, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", *arguments]
        result = subprocess.run(
            [*command, str(HERE / source), "-o", str(made), "-lm"], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"{source} does not compile:\n{result.stderr}")
        made.replace(path)
    return path
