"""The compile kit: a folder with all that the vendor's compiler needs, and what makes an artifact of its MXQ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files as package_files
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_npu.artifact import Artifact
from lightning_npu.compile.mobilint_calibration import write_calibration
from lightning_npu.compile.mobilint_export import MobilintExport
from lightning_npu.compile.mobilint_layout import hwc_shape
from lightning_npu.compile.mobilint_options import CALIBRATION, MobilintOptions
from lightning_npu.compile.mobilint_readme import readme
from lightning_npu.compile.npz import save_samples
from lightning_npu.compile.samples import Samples
from lightning_npu.errors import CompileError
from lightning_npu.manifest import sha256_file, sha256_json

KIT, FORMAT, VERSION = "kit.json", "lightning-npu-compile-kit", 1
MODEL, JUDGING, ARTIFACT, MXQ = "model.onnx", "judging.npz", "onnx.npu", "model.mxq"
_AGAIN = "write the kit again: compile with target='mobilint'"


@dataclass(frozen=True)
class Kit:
    """A kit that was read and verified.

    Attributes:
        path: its folder.
        content: kit.json.
        artifact: the head compiled for target "onnx", of which the finished artifact takes everything but the MXQ.
    """

    path: Path
    content: Mapping[str, Any]
    artifact: Artifact

    @property
    def judging(self) -> Path:
        """The samples that judge fidelity; none of them calibrates."""
        return self.path / JUDGING


def write_kit(
    folder: Path,
    exported: MobilintExport,
    options: MobilintOptions,
    bits: Mapping[str, Any],
    calibrating: Samples,
    judging: Samples,
) -> None:
    """Complete ``folder``, which holds the exported model and the ONNX artifact already, with everything else.

    Args:
        folder: a new folder.
        exported: what was exported to its model.onnx.
        options: what was chosen.
        bits: bits per kind of layer, as the compiler shall be told.
        calibrating: samples that calibrate.
        judging: samples that judge.
    """
    artifact = Artifact.load(folder / ARTIFACT)
    manifest = artifact.manifest
    save_samples(judging, folder / JUDGING)
    written = write_calibration(calibrating, exported.inputs, folder)
    shutil.copyfile(str(package_files("lightning_npu.compile") / "mobilint_script.py"), folder / "compile.py")
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "head": {
            **{key: manifest["source"][key] for key in ("module", "cut", "parameters")},
            "inputs": [
                {"name": spec.name, "layout": "HWC", "dtype": spec.dtype, "shape": list(hwc_shape(spec))}
                for spec in exported.inputs
            ],
            "layouts": [spec.layout for spec in exported.inputs],
            "outputs": [
                {"name": spec.name, "dtype": "float32", "shape": list(hwc_shape(spec))} for spec in artifact.outputs
            ],
        },
        "model": {
            "file": MODEL,
            "sha256": sha256_file(folder / MODEL),
            "opset": 17,
            "attentions": len(exported.score_products),
            "score_products": list(exported.score_products),
            "node_counts": dict(exported.node_counts),
            "max_abs_error": dict(exported.max_abs_error),
        },
        "compile": {
            "core_mode": options.core_mode,
            "bits": dict(bits),
            "score_bits": options.score_bits,
            "calibration": dict(CALIBRATION),
            "uint8": _uint8(exported),
        },
        "calibration": {"samples": written, "count": calibrating.count, "sha256": calibrating.sha256()},
        "judging": {"file": JUDGING, "sha256": sha256_file(folder / JUDGING), "count": judging.count},
        "artifact": {"folder": ARTIFACT, "fingerprint": artifact.fingerprint},
        "fidelity_required": options.fidelity,
        "script_sha256": sha256_file(folder / "compile.py"),
        "tools": dict(manifest["tools"]),
    }
    content["kit_sha256"] = sha256_json(content)
    (folder / KIT).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    (folder / "README.md").write_text(readme(content, artifact), encoding="utf-8")


def _uint8(exported: MobilintExport) -> dict[str, Any] | None:
    """What the compiler shall do with raw pixels; None where nothing is uint8."""
    if not exported.pixels:
        return None
    pipeline = []
    first = next(iter(exported.pixels.values()))
    if exported.fused and not first.only_unit:
        pipeline.append(
            {
                "op": "normalize",
                "mean": first.mean,
                "std": first.std,
                "scaleToUint8": True,
                "fuseIntoFirstLayer": True,
            }
        )
    return {
        "fused": exported.fused,
        "inputs": list(exported.pixels),
        "channels": len(first.scale),
        "pipeline": pipeline,
        "scales": {name: {"mean": scale.mean, "std": scale.std} for name, scale in exported.pixels.items()},
    }


def read_kit(path: Path) -> Kit:
    """Read a kit and verify every file but those for the compiler, which compile.py verifies.

    Raises:
        CompileError: it is none, is damaged, or was made by another version.
    """
    file = path / KIT
    if not file.is_file():
        raise CompileError(
            f"{path} is no compile kit.",
            expected=f"a folder with {KIT}",
            remedy="give the MXQ's place in its kit: lightning-npu compile --finish KIT/model.mxq",
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompileError(f"{file} is damaged: {error}.", expected="JSON", remedy=_AGAIN) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CompileError(f"{file} does not describe a compile kit.", expected=f'"format": "{FORMAT}"', remedy=_AGAIN)
    if content.get("version") != VERSION:
        raise CompileError(
            f"{path} was written by another version of lightning-npu.",
            expected=f"version {VERSION}",
            got=content.get("version"),
            remedy=f"use the version that wrote it, or {_AGAIN}",
        )
    claimed = content.pop("kit_sha256", None)
    if claimed != sha256_json(content):
        raise CompileError(f"{file} was edited after it was written.", remedy=_AGAIN)
    content["kit_sha256"] = claimed
    judging = path / str(content["judging"]["file"])
    if PurePosixPath(content["judging"]["file"]).name != content["judging"]["file"] or not judging.is_file():
        raise CompileError(f"{judging} is missing.", remedy=_AGAIN)
    if sha256_file(judging) != content["judging"]["sha256"]:
        raise CompileError(f"{judging} was changed or damaged.", expected=content["judging"]["sha256"], remedy=_AGAIN)
    artifact = Artifact.load(path / ARTIFACT)
    if artifact.fingerprint != content["artifact"]["fingerprint"]:
        raise CompileError(
            f"{path / ARTIFACT} is not the one that the kit was written with.",
            expected=content["artifact"]["fingerprint"],
            got=artifact.fingerprint,
            remedy=_AGAIN,
        )
    return Kit(path, content, artifact)
