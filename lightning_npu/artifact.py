"""An artifact: a compiled, frozen module on disk. A folder with ``manifest.json`` and the files that it lists."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from lightning_npu.errors import ArtifactError
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Node, node_from_json
from lightning_npu.tensor_spec import TensorSpec

MANIFEST = "manifest.json"
FORMAT = "lightning-npu-artifact"
SCHEMA_VERSION = 1
_MAX_MANIFEST_BYTES = 64 << 20
_COMPILE_AGAIN = "compile the module again (lightning_npu.offload or lightning_npu.compile_module)"


@dataclass(frozen=True)
class OutputFidelity:
    """How near one output is to that of the FP32 module, on inputs that were not used to calibrate.

    Attributes:
        cosine: mean over samples of the cosine between the sample's candidate and reference values, flattened.
        sqnr_db: signal to quantisation noise ratio over all values of all samples, in decibels.
        max_abs_error: largest absolute difference, in the output's own unit.
    """

    cosine: float
    sqnr_db: float
    max_abs_error: float

    def to_json(self) -> dict[str, Any]:
        """Primitives; an infinite error, which JSON has no number for, is written as None."""
        error = self.max_abs_error if math.isfinite(self.max_abs_error) else None
        return {"cosine": self.cosine, "sqnr_db": self.sqnr_db, "max_abs_error": error}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputFidelity:
        """The inverse of :meth:`to_json`."""
        error = data["max_abs_error"]
        return cls(float(data["cosine"]), float(data["sqnr_db"]), math.inf if error is None else float(error))


@dataclass(frozen=True)
class Artifact:
    """A loaded and verified artifact. Make one with :meth:`load`; it is read-only.

    Attributes:
        path: the folder.
        manifest: the whole manifest, as documented in docs/artifact.md.
        inputs: what the model takes, in order.
        outputs: what the model gives, in order.
        signature: how the replaced module is called.
        structure: what the replaced module returns; leaves count the outputs first, then the inputs.
        fidelity: per output, measured when it was compiled.
    """

    path: Path
    manifest: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    signature: CallSignature
    structure: Node
    fidelity: Mapping[str, OutputFidelity]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the artifact computes; equal for two compilations that gave the same model."""
        return str(self.manifest["fingerprint"])

    @property
    def target(self) -> str:
        """What it was compiled for, such as "onnx"."""
        return str(self.manifest["target"])

    @property
    def precision(self) -> str:
        """One of "a8w8", "a16w8", "fp32"; "mixed" when some layers are wider than the rest."""
        return str(self.manifest["precision"])

    def file(self, role: str) -> Path:
        """The path of the file with this role: "model", "reference", "probe".

        Raises:
            ArtifactError: there is none.
        """
        entry = self.manifest["files"].get(role)
        if entry is None:
            raise ArtifactError(
                f"{self.path} holds no file for '{role}'.", expected=f"one of {sorted(self.manifest['files'])}"
            )
        return self.path / str(entry["path"])

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read the folder ``path`` and verify it: schema, safe file names, sizes and SHA-256 of every file.

        Raises:
            ArtifactError: it is missing, truncated, edited, of a newer version, or reaches outside of its folder.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        _validate(manifest, folder / MANIFEST)
        for role, entry in manifest["files"].items():
            _verify(folder, role, entry)
        return cls(
            path=folder.resolve(),
            manifest=manifest,
            inputs=tuple(TensorSpec.from_json(spec) for spec in manifest["inputs"]),
            outputs=tuple(TensorSpec.from_json(spec) for spec in manifest["outputs"]),
            signature=CallSignature.from_json(manifest["signature"]),
            structure=node_from_json(manifest["structure"]),
            fidelity={name: OutputFidelity.from_json(f) for name, f in manifest["fidelity"]["outputs"].items()},
        )

    def __repr__(self) -> str:
        return f"Artifact({str(self.path)!r}, target={self.target!r}, precision={self.precision!r})"


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


@contextmanager
def new_folder(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its place when the block ends well, and vanishes when not.

    Raises:
        ArtifactError: ``output`` exists and may not be overwritten, or is not an artifact.
    """
    if output.exists() and not overwrite:
        raise ArtifactError(
            f"{output} exists already.", remedy="choose another output, delete it, or pass overwrite=True"
        )
    if output.exists() and not (output / MANIFEST).is_file():
        raise ArtifactError(
            f"{output} exists and is not an artifact, so it is not overwritten.",
            expected="a new path, or a folder with manifest.json",
            remedy="choose another output",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(output, "new")
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():  # on disk before the name is: a crash leaves no half-written artifact
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())
        _replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_manifest(folder: Path, content: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """Complete ``content`` with files, fingerprint and checksums, and write it as ``folder``'s manifest.

    Args:
        folder: the folder with the files.
        content: every manifest entry that is not derived here.
        roles: file name by role; two roles may share a file.
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
    manifest["fingerprint"] = _fingerprint(manifest)
    manifest["manifest_sha256"] = _sha256_json(manifest)
    _validate(manifest, folder / MANIFEST)
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / MANIFEST)


def _fingerprint(manifest: Mapping[str, Any]) -> str:
    keys = ("target", "precision", "inputs", "outputs", "signature", "structure")
    files = {role: manifest["files"][role]["sha256"] for role in ("model", "reference")}
    return _sha256_json({**{key: manifest[key] for key in keys}, "files": files})


def _sha256_json(value: Mapping[str, Any]) -> str:
    plain = {key: item for key, item in value.items() if key != "manifest_sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise ArtifactError(
            f"There is no artifact at {folder}.", expected="a folder with manifest.json", remedy=_COMPILE_AGAIN
        )
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactError(
            f"{folder} is not an artifact.",
            expected="a folder with manifest.json",
            got="a file" if folder.is_file() else f"a folder with {sorted(p.name for p in folder.iterdir())[:5]}",
            remedy="give the path of the *.npu folder",
        )
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path} is too large for a manifest.", expected="64 MiB at most", remedy=_COMPILE_AGAIN)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}.", expected="JSON", remedy=_COMPILE_AGAIN) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(f"{path} is not the manifest of an artifact.", expected=f'"format": "{FORMAT}"')
    found = manifest.get("schema_version")
    if isinstance(found, int) and found > SCHEMA_VERSION:
        raise ArtifactError(
            f"{folder} was made by a newer version of lightning-npu.",
            expected=f"schema_version {SCHEMA_VERSION}",
            got=f"schema_version {found}",
            remedy="update: pip install --upgrade lightning-npu",
        )
    return manifest


@functools.cache
def _schema() -> dict[str, Any]:
    text = (package_files("lightning_npu") / "manifest.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _validate(manifest: Mapping[str, Any], path: Path) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(_schema()).iter_errors(manifest))
    if error is not None:
        place = "/".join(str(part) for part in error.absolute_path) or "the top level"
        raise ArtifactError(f"{path} breaks the manifest's schema at {place}: {error.message}.", remedy=_COMPILE_AGAIN)
    if manifest["manifest_sha256"] != _sha256_json(manifest) or manifest["fingerprint"] != _fingerprint(manifest):
        raise ArtifactError(
            f"{path} was edited after it was written: its checksum does not fit its content.", remedy=_COMPILE_AGAIN
        )


def _verify(folder: Path, role: str, entry: Mapping[str, Any]) -> None:
    path = folder / str(entry["path"])
    root = folder.resolve()
    if path.resolve().parent != root:
        raise ArtifactError(
            f"File '{role}' of {folder} leaves the artifact's folder.",
            expected=f"a file in {root}",
            got=str(path.resolve()),
            remedy="do not use this artifact; get it again from somebody you trust",
        )
    if not path.is_file():
        raise ArtifactError(f"File '{role}' of {folder} is missing.", expected=str(path.name), remedy=_COMPILE_AGAIN)
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ArtifactError(
            f"File '{role}' ({path.name}) of {folder} is truncated or was replaced.",
            expected=f"{entry['bytes']} bytes",
            got=f"{size} bytes",
            remedy=f"copy the folder again, or {_COMPILE_AGAIN}",
        )
    digest = sha256_file(path)
    if digest != entry["sha256"]:
        raise ArtifactError(
            f"File '{role}' ({path.name}) of {folder} was edited or damaged: its SHA-256 is wrong.",
            expected=entry["sha256"],
            got=digest,
            remedy=f"copy the folder again, or {_COMPILE_AGAIN}",
        )


def _replace(new: Path, output: Path) -> None:
    """Put ``new`` where ``output`` is; the old folder is moved aside first and deleted last."""
    if not output.exists():
        new.rename(output)
        return
    aside = _beside(output, "old")
    output.rename(aside)
    try:
        new.rename(output)
    except BaseException:
        aside.rename(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _beside(output: Path, kind: str) -> Path:
    return output.parent / f".{output.name}.{kind}.{secrets.token_hex(4)}"
