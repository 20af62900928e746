"""``manifest.json``: read with suspicion, checked against its schema and its own checksums, and written."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from lightning_npu.errors import ArtifactError

MANIFEST = "manifest.json"
FORMAT = "lightning-npu-artifact"
SCHEMA_VERSION = 1
COMPILE_AGAIN = "compile the module again (lightning_npu.offload or lightning_npu.compile_module)"
_MAX_BYTES = 64 << 20
_MAX_DEPTH = 64  # objects and lists inside each other: 30 levels of nested outputs


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``; it fits the schema and its checksums fit it.

    Raises:
        ArtifactError: there is none, it is damaged, edited, or of a newer version.
    """
    path = folder / MANIFEST
    try:
        text = _text(folder, path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ArtifactError(
            f"{str(folder)[:300]} cannot be read: {getattr(error, 'strerror', None) or error}.",
            expected="a folder with manifest.json that this process may read",
            remedy="check the path and its permissions",
        ) from error
    try:
        manifest = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_integer)
        _bound_depth(manifest)
        json.dumps(manifest, ensure_ascii=False).encode()  # "\ud800" stands for no character
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}.", expected="JSON", remedy=COMPILE_AGAIN) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(
            f"{path} is not the manifest of an artifact.",
            expected=f'"format": "{FORMAT}"',
            remedy="give the path of the *.npu folder",
        )
    found = manifest.get("schema_version")
    if isinstance(found, int) and found > SCHEMA_VERSION:
        raise ArtifactError(
            f"{folder} was made by a newer version of lightning-npu.",
            expected=f"schema_version {SCHEMA_VERSION}",
            got=f"schema_version {found}",
            remedy="update: pip install --upgrade lightning-npu",
        )
    validate(manifest, path)
    return manifest


def validate(manifest: Mapping[str, Any], path: Path) -> None:
    """Refuse a manifest that breaks the schema or was edited; errors call it ``path``.

    Raises:
        ArtifactError: with the place that is wrong.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(_schema()).iter_errors(manifest))
    if error is not None:
        place = "/".join(str(part) for part in error.absolute_path) or "the top level"
        message = error.message if len(error.message) <= 400 else f"{error.message[:200]} ... {error.message[-200:]}"
        raise ArtifactError(f"{path} breaks the manifest's schema at {place}: {message}.", remedy=COMPILE_AGAIN)
    if manifest["manifest_sha256"] != sha256_json(manifest) or manifest["fingerprint"] != fingerprint(manifest):
        raise ArtifactError(
            f"{path} was edited after it was written: its checksum does not fit its content.", remedy=COMPILE_AGAIN
        )


def complete(folder: Path, content: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """The whole manifest of ``folder``: ``content`` with files, fingerprint and checksums.

    Args:
        folder: the folder with the files.
        content: every manifest entry that is not derived here.
        roles: file name by role; two roles may share a file.

    Raises:
        ArtifactError: the content breaks the schema or nests too deep.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **content,
        "files": {
            role: {"path": name, "sha256": sha256_file(folder / name), "bytes": (folder / name).stat().st_size}
            for role, name in roles.items()
        },
    }
    try:
        _bound_depth(manifest)
        manifest["fingerprint"] = fingerprint(manifest)
        manifest["manifest_sha256"] = sha256_json(manifest)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"This module's artifact cannot be described: {error}.",
            expected="finite numbers, and inputs and outputs that are nested less deep",
            remedy="wrap the module in one that takes and returns plain tensors, and compile that",
        ) from error
    validate(manifest, folder / MANIFEST)
    return manifest


def store(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a complete manifest into ``folder``, whole or not at all."""
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / MANIFEST)


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of what the artifact computes."""
    keys = ("target", "precision", "inputs", "outputs", "signature", "structure")
    files = {
        role: manifest["files"][role]["sha256"] for role in ("model", "reference", "mxq") if role in manifest["files"]
    }
    return sha256_json({**{key: manifest[key] for key in keys}, "files": files})


def sha256_json(value: Mapping[str, Any]) -> str:
    """SHA-256 of ``value`` but for its own ``manifest_sha256``, whatever the order of its entries."""
    plain = {key: item for key, item in value.items() if key != "manifest_sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _text(folder: Path, path: Path) -> str:
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"There is no artifact at {folder}.",
            expected="a folder with manifest.json",
            remedy="give its new path if it was moved, or move it back for what was pickled with this path; "
            f"else {COMPILE_AGAIN}",
        ) from None
    if not path.is_file():
        names = [] if folder.is_file() else sorted(entry.name for entry in folder.iterdir())[:5]
        raise ArtifactError(
            f"{folder} is not an artifact.",
            expected="a folder with manifest.json",
            got="a file" if folder.is_file() else f"a folder with {names}",
            remedy="give the path of the *.npu folder",
        )
    if path.stat().st_size > _MAX_BYTES:
        raise ArtifactError(f"{path} is too large for a manifest.", expected="64 MiB at most", remedy=COMPILE_AGAIN)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is damaged: {error}.", expected="UTF-8", remedy=COMPILE_AGAIN) from error


def _bound_depth(value: Any) -> None:
    """Stop what is nested so deep that walking it would exhaust the stack."""
    level, depth = [value], 0
    while level:
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level, depth = inner, depth + 1


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # also 1e999
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _integer(text: str) -> int:
    _number(text)
    return int(text)


@functools.cache
def _schema() -> dict[str, Any]:
    text = (package_files("lightning_npu") / "manifest.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
