"""Whether a file can be an MXQ: the vendor says the same of a missing, an empty and a damaged one."""

from __future__ import annotations

from pathlib import Path

from lightning_npu.errors import ArtifactError

# what qbruntime 1.1 to 1.5 look for first: other beginnings give "Invalid magic value", this one asks for a version
MAGIC = b".MXQ"
_LEAST_BYTES = 64
_REMEDY = "copy the artifact again, or compile the module again"


def check_mxq(path: Path) -> None:
    """Refuse a file that cannot be an MXQ, before ``qbruntime`` sees it.

    Raises:
        ArtifactError: it is missing, a folder, empty, too short, unreadable, or begins otherwise.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever, in the vendor's library with the GIL
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ArtifactError(f"{path} is {kind}.", expected="an MXQ file", remedy=_REMEDY)
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(len(MAGIC))
    except FileNotFoundError:
        raise ArtifactError(f"There is no MXQ file at {path}.", remedy=_REMEDY) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", remedy="check its permissions") from error
    if size == 0:
        raise ArtifactError(f"{path} is empty.", expected="an MXQ file", remedy=_REMEDY)
    if head != MAGIC:
        pointer = head == b"vers"  # "version https://git-lfs.github.com/spec/v1"
        raise ArtifactError(
            f"{path} is no MXQ file.",
            expected=f"a file that begins with {MAGIC!r}",
            got=repr(head),
            remedy="it looks like a Git LFS pointer: fetch the file itself with `git lfs pull`" if pointer else _REMEDY,
        )
    if size < _LEAST_BYTES:
        raise ArtifactError(f"{path} is cut off.", expected="an MXQ file", got=f"{size} bytes", remedy=_REMEDY)
