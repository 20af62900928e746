"""Writing an artifact's folder: whole or not at all, beside other processes that write the same one."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_npu.errors import ArtifactError, FidelityError, InputError
from lightning_npu.manifest import MANIFEST

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, so nothing that was left behind is touched
    fcntl = None  # type: ignore[assignment]

_OTHER_OUTPUT = "choose another output, delete it, or pass overwrite=True"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_FULL_BYTES = 64 << 10
_DEAD_AFTER_S = 24 * 3600


@contextmanager
def new_folder(output: Path, *, overwrite: bool, marker: str = MANIFEST) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its place when the block ends well, and vanishes when not.

    A process that is killed leaves it behind; the next one that writes the same output removes it. Where ``output``
    is a link to a folder, that folder is replaced and the link stays.

    Args:
        output: the folder to write.
        overwrite: replace what is there, if it is a folder of the same kind.
        marker: the file that every folder of this kind holds; default: that of an artifact.

    Raises:
        ArtifactError: ``output`` exists, from the start or meanwhile, and may not be overwritten; it is not an
            artifact; or it cannot be written, for example because the disk is full.
    """
    try:
        output = _destination(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        _tidy(output)
        _require_free(output, overwrite, marker)
        temporary = _beside(output, "tmp")
        temporary.mkdir()
    except OSError as error:
        raise _cannot_write(output, error) from error
    try:
        with _held(temporary):  # locked before it has the name by which left-behind ones are found
            temporary = temporary.rename(_beside(output, "new"))
            yield temporary
            _synchronise(temporary)
            _take_place(temporary, output, overwrite, marker)
    except Exception as error:
        cause = _write_failure(error, temporary)
        if cause is None:
            raise
        raise _cannot_write(output, cause) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _destination(output: Path) -> Path:
    """The folder to write: ``output``, or where it leads as a link."""
    if not output.is_symlink():
        return output
    if not output.exists():
        raise ArtifactError(
            f"{output} is a link to {output.readlink()}, which is not there.",
            expected="a new path, or a link to an artifact",
            remedy="delete the link, or choose another output",
        )
    return output.resolve()


def _require_free(output: Path, overwrite: bool, marker: str) -> None:
    try:
        output.lstat()
    except FileNotFoundError:
        return
    if not overwrite:
        raise ArtifactError(f"{output} exists already.", expected="a new path", remedy=_OTHER_OUTPUT)
    _require_kind(output, marker)


def _require_kind(output: Path, marker: str) -> None:
    if os.path.lexists(output) and not (output / marker).is_file():
        raise ArtifactError(
            f"{output} exists and is not an artifact, so it is not overwritten."
            if marker == MANIFEST
            else f"{output} exists and holds no {marker}, so it is not overwritten.",
            expected=f"a new path, or a folder with {marker}",
            remedy="choose another output",
        )


# ---- taking the output's place


def _take_place(new: Path, output: Path, overwrite: bool, marker: str) -> None:
    """Put ``new`` where ``output`` is; what is there is moved aside first and deleted last."""
    while not _renamed(new, output):
        if not overwrite or output.is_symlink():
            raise ArtifactError(
                f"{output} appeared meanwhile: something else wrote it.",
                expected="nothing there, as when the compilation began",
                remedy=f"use what is there now, or {_OTHER_OUTPUT}",
            )
        _require_kind(output, marker)
        with suppress(FileNotFoundError), _held(output):  # not there: another process has just moved it aside
            aside = output.rename(_beside(output, "old"))
            try:
                done = _renamed(new, output)
            except BaseException:
                aside.rename(output)
                raise
            shutil.rmtree(aside, ignore_errors=True)
            if done:
                break
    _synchronise_names(output.parent)


def _renamed(new: Path, output: Path) -> bool:
    """Rename unless something is there: a folder cannot be renamed onto one that holds something."""
    try:
        new.rename(output)
    except OSError as error:
        if error.errno in _TAKEN and os.path.lexists(output):
            return False
        raise
    return True


def _synchronise(folder: Path) -> None:
    """On disk before the name is: a crash leaves no half-written artifact."""
    for path in folder.iterdir():
        if path.is_dir():
            _synchronise(path)
            continue
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
    _synchronise_names(folder)


def _synchronise_names(folder: Path) -> None:
    with suppress(OSError):  # some network file systems and Windows cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- what killed processes leave behind


def _tidy(output: Path) -> None:
    """Remove what they left of this output; bring back an old folder that one had moved aside."""
    pattern = re.compile(rf"{re.escape(_stem(output))}\.(new|old)\.([0-9a-f]{{8}})\.[0-9a-f]{{8}}")
    for path in output.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        with suppress(OSError), _held(path) as alone:
            # locks of another machine may not be seen here
            known = match[2] == _machine() or time.time() - path.stat().st_mtime > _DEAD_AFTER_S
            if alone and known:
                if match[1] == "old" and not os.path.lexists(output):
                    path.rename(output)
                else:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock ``folder`` for the block, through renamings; the system unlocks it when the process ends, however it does.

    Gives whether this process holds it now; False where another does or the file system cannot lock.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(descriptor)


def _beside(output: Path, kind: str) -> Path:
    return output.parent / f"{_stem(output)}.{kind}.{_machine()}.{secrets.token_hex(4)}"


def _stem(output: Path) -> str:
    name = os.fsencode(output.name)
    return f".{output.name}" if len(name) <= 200 else f".{hashlib.sha256(name).hexdigest()}"


def _machine() -> str:
    """Eight hex digits for the running kernel: file locks are surely seen by all processes on it."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        identity = platform.node()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


# ---- failures


def _write_failure(error: BaseException, folder: Path) -> OSError | None:
    """The failed write behind ``error``, whatever was made of it on the way; None where it is something else."""
    if isinstance(error, (ArtifactError, FidelityError, InputError)):
        return None
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            inside = isinstance(link.filename, (str, os.PathLike)) and Path(link.filename).parent == folder
            if link.errno in _NO_ROOM or inside:
                return link
        link = link.__cause__ or link.__context__
    with suppress(OSError):  # libraries in C++ tell their own story of a full disk
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _cannot_write(output: Path, error: OSError) -> ArtifactError:
    name = str(output) if len(str(output)) <= 300 else f"{str(output)[:300]}..."
    remedy = {
        errno.ENOSPC: "free space on that disk, or choose an output on another",
        errno.EDQUOT: "free space within your quota, or choose an output elsewhere",
        errno.EFBIG: "raise the limit of file sizes (ulimit -f), or choose an output on another file system",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ENOTDIR: "choose an output whose parents are folders",
        errno.EEXIST: "choose an output whose parents are folders",
    }.get(error.errno or 0, "choose an output where this process may write")
    return ArtifactError(
        f"{name} cannot be written: {error.strerror or error}.", expected="a path that can be written", remedy=remedy
    )
