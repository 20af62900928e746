"""Files that are whole or absent: written beside their place and renamed, checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path in ``path``'s folder; rename it to ``path`` where the block succeeds, else delete it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def fingerprint(settings: Any) -> str:
    """Twelve hexadecimal digits that stand for a JSON-able description of how something was made."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_or_make(
    path: Path, load: Callable[[Path], Any], make: Callable[[], Any], save: Callable[[Path, Any], None]
) -> Any:
    """Return what ``path`` holds; where it is absent or ``load`` refuses it, make it anew and save it."""
    if path.exists():
        try:
            return load(path)
        except Exception as broken:  # whatever is wrong with a cache, the remedy is the same
            print(f"{path} is damaged ({broken}); making it again")
    made = make()
    with whole_file(path) as temporary:
        save(temporary, made)
    return made
