"""An artifact: a compiled, frozen module on disk. A folder with ``manifest.json`` and the files that it lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_npu.artifact_folder import new_folder as new_folder
from lightning_npu.errors import ArtifactError
from lightning_npu.manifest import COMPILE_AGAIN, complete, read_manifest, sha256_file, store
from lightning_npu.manifest import MANIFEST as MANIFEST
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Items, Leaf, Named, Node, node_from_json
from lightning_npu.tensor_spec import TensorSpec


@dataclass(frozen=True)
class OutputFidelity:
    """How near one output is to that of the FP32 module, on inputs that were not used to calibrate.

    Attributes:
        cosine: mean over samples of the cosine between the sample's candidate and reference values, flattened.
        sqnr_db: signal to quantisation noise ratio over all values of all samples, in decibels.
        max_abs_error: largest absolute difference, in the output's own unit.
        centred_sqnr_db: the same ratio for what varies between samples, in the median feature: its variance over its
            mean squared error. ``sqnr_db`` where nothing varies or samples are few; None if it was not measured.
    """

    cosine: float
    sqnr_db: float
    max_abs_error: float
    centred_sqnr_db: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Primitives; an infinite error, which JSON has no number for, is written as None."""
        error = self.max_abs_error if math.isfinite(self.max_abs_error) else None
        figures = {"cosine": self.cosine, "sqnr_db": self.sqnr_db, "max_abs_error": error}
        return figures if self.centred_sqnr_db is None else {**figures, "centred_sqnr_db": self.centred_sqnr_db}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputFidelity:
        """The inverse of :meth:`to_json`."""
        error = data["max_abs_error"]
        return cls(
            float(data["cosine"]),
            float(data["sqnr_db"]),
            math.inf if error is None else float(error),
            float(data["centred_sqnr_db"]) if "centred_sqnr_db" in data else None,
        )


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
        """The path of the file with this role: "model", "reference", "probe", "mxq".

        Raises:
            ArtifactError: there is none.
        """
        entry = self.manifest["files"].get(role)
        if entry is None:
            raise ArtifactError(
                f"{self.path} holds no file for '{role}'.",
                expected=f"one of {sorted(self.manifest['files'])}",
                remedy=COMPILE_AGAIN,
            )
        return self.path / str(entry["path"])

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read the folder ``path`` and verify it: schema, safe file names, sizes and SHA-256 of every file.

        Raises:
            ArtifactError: it is missing, truncated, edited, of a newer version, or reaches outside of its folder.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        artifact = cls._described(manifest, folder)
        _verify_files(folder, manifest)
        return artifact

    def verify(self) -> None:
        """Make sure that the folder still holds what was loaded: the manifest's fingerprint, each file's SHA-256.

        Raises:
            ArtifactError: it was replaced, moved, deleted, edited or damaged since.
        """
        if not (self.path / MANIFEST).is_file():
            raise ArtifactError(
                "The artifact was moved or deleted since it was loaded.",
                expected=f"a folder with manifest.json at {self.path}",
                remedy="move it back, or pass its new path: NPUFrozenModule(new_path)",
            )
        manifest = read_manifest(self.path)
        if manifest["fingerprint"] != self.fingerprint:
            raise ArtifactError(
                f"The artifact at {self.path} was replaced since it was loaded.",
                expected=f"fingerprint {self.fingerprint}",
                got=f"fingerprint {manifest['fingerprint']}",
                remedy="load it again to use the new one, or put the old one back; give each artifact its own folder",
            )
        _verify_files(self.path, manifest)

    @classmethod
    def _described(cls, manifest: Mapping[str, Any], folder: Path) -> Artifact:
        """What a valid manifest says; refuses one whose parts do not fit each other."""
        try:
            artifact = cls(
                path=folder.resolve(),
                manifest=manifest,
                inputs=tuple(TensorSpec.from_json(spec) for spec in manifest["inputs"]),
                outputs=tuple(TensorSpec.from_json(spec) for spec in manifest["outputs"]),
                signature=CallSignature.from_json(manifest["signature"]),
                structure=node_from_json(manifest["structure"]),
                fidelity={name: OutputFidelity.from_json(f) for name, f in manifest["fidelity"]["outputs"].items()},
            )
            _check_parts(artifact)
        except ArtifactError as error:
            raise ArtifactError(
                f"{folder / MANIFEST} contradicts itself: {error.what}",
                expected=error.expected,
                got=error.got,
                remedy=COMPILE_AGAIN,
            ) from error
        return artifact

    def __repr__(self) -> str:
        return f"Artifact({str(self.path)!r}, target={self.target!r}, precision={self.precision!r})"


def write_manifest(folder: Path, content: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """Complete ``content`` with files, fingerprint and checksums, and write it as ``folder``'s manifest.

    Args:
        folder: the folder with the files.
        content: every manifest entry that is not derived here.
        roles: file name by role; two roles may share a file.

    Raises:
        ArtifactError: it would be refused when it is loaded.
    """
    manifest = complete(folder, content, roles)
    Artifact._described(manifest, folder)
    store(folder, manifest)


def _check_parts(artifact: Artifact) -> None:
    """Names are unique, and every index leads to a tensor."""
    for title, specs in (("inputs", artifact.inputs), ("outputs", artifact.outputs)):
        _require_unique(title, [spec.name for spec in specs])
    parameters = artifact.signature.parameters
    _require_unique("parameters", [parameter.name for parameter in parameters])
    for parameter in parameters:
        wanted = {"var_positional": Items, "var_keyword": Named}.get(parameter.kind, Node)
        if not isinstance(parameter.node, wanted):
            raise ArtifactError(f"Parameter '{parameter.name}' does not hold what its kind says.", got=parameter.kind)
    found = [index for parameter in parameters for index in _leaves(parameter.node)]
    if found != list(range(len(artifact.inputs))):
        raise ArtifactError(
            "The signature does not lead to every input once, in order.",
            expected=f"tensors 0 to {len(artifact.inputs) - 1}",
            got=found[:20],
        )
    count = len(artifact.outputs) + len(artifact.inputs)
    beyond = [index for index in _leaves(artifact.structure) if index >= count]
    if beyond:
        raise ArtifactError(
            "The structure names tensors that are not there.", expected=f"indices below {count}", got=beyond[:20]
        )
    unknown = sorted(set(artifact.fidelity) - {spec.name for spec in artifact.outputs})
    if unknown:
        raise ArtifactError(
            "There are fidelity figures of outputs that are not there.",
            expected=[spec.name for spec in artifact.outputs],
            got=unknown[:20],
        )
    _check_mobilint(artifact)


def _check_mobilint(artifact: Artifact) -> None:
    """What is said of the MXQ is said of a listed file, and of as many tensors as there are."""
    section = artifact.manifest.get("mobilint")
    if section is None:
        return
    listed = artifact.manifest["files"].get("mxq", {}).get("path")
    if section["file"] != listed:
        raise ArtifactError("The MXQ is not among the listed files.", expected=listed, got=section["file"])
    for title, specs in (("inputs", artifact.inputs), ("outputs", artifact.outputs)):
        if len(section[title]) != len(specs):
            raise ArtifactError(
                f"The MXQ has another number of {title} than the artifact.",
                expected=len(specs),
                got=len(section[title]),
            )


def _require_unique(title: str, names: Sequence[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ArtifactError(f"Two {title} have one name.", expected="unique names", got=twice[:20])


def _leaves(node: Node) -> Iterator[int]:
    if isinstance(node, Leaf):
        yield node.index
    elif isinstance(node, (Items, Named)):
        for item in node.items:
            yield from _leaves(item)


def _verify_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    for role, entry in manifest["files"].items():
        try:
            _verify(folder, role, entry)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise ArtifactError(
                f"File '{role}' of {folder} cannot be read: {error}.",
                expected=str(entry["path"]),
                remedy=f"check its permissions, copy the folder again, or {COMPILE_AGAIN}",
            ) from error


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
        raise ArtifactError(f"File '{role}' of {folder} is missing.", expected=str(path.name), remedy=COMPILE_AGAIN)
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ArtifactError(
            f"File '{role}' ({path.name}) of {folder} is truncated or was replaced.",
            expected=f"{entry['bytes']} bytes",
            got=f"{size} bytes",
            remedy=f"copy the folder again, or {COMPILE_AGAIN}",
        )
    digest = sha256_file(path)
    if digest != entry["sha256"]:
        raise ArtifactError(
            f"File '{role}' ({path.name}) of {folder} was edited or damaged: its SHA-256 is wrong.",
            expected=entry["sha256"],
            got=digest,
            remedy=f"copy the folder again, or {COMPILE_AGAIN}",
        )
