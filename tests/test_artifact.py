"""A damaged, edited, foreign or newer artifact is refused by name, and writing leaves nothing half done."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import lightning_npu as npu
from lightning_npu.artifact import MANIFEST, _sha256_json, new_folder


def edit_manifest(folder: Path, *, resign: bool = False, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(changes)
    if resign:
        manifest["manifest_sha256"] = _sha256_json(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_load_gives_what_was_compiled(compiled: npu.Artifact) -> None:
    loaded = npu.Artifact.load(compiled.path)
    assert loaded.precision == "a8w8"
    assert [spec.name for spec in loaded.inputs] == ["images"]
    assert [(spec.name, spec.shape, spec.layout) for spec in loaded.outputs] == [
        ("output_0", (None, 16, 8), "NLC"),
        ("output_1", (None, 8), "NC"),
    ]
    assert set(loaded.fidelity) == {"output_0", "output_1"}
    assert loaded.fingerprint == compiled.fingerprint
    assert loaded.manifest["calibration"] == {**compiled.manifest["calibration"], "samples": 32, "holdout_samples": 8}
    assert set(loaded.manifest["files"]) == {"model", "reference", "probe"}
    source = loaded.manifest["source"]
    assert source["module"].endswith("Encoder")
    assert "stem.0.weight" in source["state"]


def test_an_artifact_holds_no_path_of_the_machine_that_made_it(compiled: npu.Artifact) -> None:
    for path in compiled.path.iterdir():
        content = path.read_bytes()
        for secret in (str(Path(__file__).parent), str(Path.home()) + "/", os.fspath(compiled.path.parent)):
            assert secret.encode() not in content, f"{path.name} holds {secret}"


@pytest.mark.parametrize("role", ["model.onnx", "reference.onnx", "probe.npz"])
def test_a_truncated_file_is_refused(artifact_copy: Path, role: str) -> None:
    path = artifact_copy / role
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(npu.ArtifactError, match=rf"{role}\) of .* is truncated(.|\n)*Expected: \d+ bytes"):
        npu.Artifact.load(artifact_copy)


def test_an_edited_file_is_refused(artifact_copy: Path) -> None:
    content = bytearray((artifact_copy / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (artifact_copy / "model.onnx").write_bytes(content)
    with pytest.raises(npu.ArtifactError, match=r"its SHA-256 is wrong(.|\n)*Expected: [0-9a-f]{64}\n  Got: [0-9a-f]"):
        npu.Artifact.load(artifact_copy)


def test_a_missing_file_is_named(artifact_copy: Path) -> None:
    (artifact_copy / "model.onnx").unlink()
    with pytest.raises(npu.ArtifactError, match=r"File 'model' of .* is missing"):
        npu.Artifact.load(artifact_copy)


def test_a_missing_artifact_is_named(tmp_path: Path) -> None:
    with pytest.raises(npu.ArtifactError, match=r"There is no artifact at .*none.npu(.|\n)*compile the module again"):
        npu.Artifact.load(tmp_path / "none.npu")
    (tmp_path / "other").mkdir()
    with pytest.raises(npu.ArtifactError, match="is not an artifact"):
        npu.Artifact.load(tmp_path / "other")


def test_a_newer_schema_says_to_update(artifact_copy: Path) -> None:
    edit_manifest(artifact_copy, schema_version=2)
    with pytest.raises(npu.ArtifactError, match=r"newer version(.|\n)*schema_version 2(.|\n)*pip install --upgrade"):
        npu.Artifact.load(artifact_copy)


def test_an_edited_manifest_is_refused(artifact_copy: Path) -> None:
    edit_manifest(artifact_copy, precision="fp32")
    with pytest.raises(npu.ArtifactError, match="was edited after it was written"):
        npu.Artifact.load(artifact_copy)


def test_a_manifest_that_is_no_json_is_refused(artifact_copy: Path) -> None:
    (artifact_copy / MANIFEST).write_text('{"format": ')
    with pytest.raises(npu.ArtifactError, match="is damaged"):
        npu.Artifact.load(artifact_copy)
    (artifact_copy / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(npu.ArtifactError, match="is damaged"):
        npu.Artifact.load(artifact_copy)


@pytest.mark.parametrize("path", ["../secret.onnx", "/etc/passwd", "sub/model.onnx", "..", ""])
def test_a_path_that_leaves_the_folder_is_refused(artifact_copy: Path, path: str) -> None:
    files = json.loads((artifact_copy / MANIFEST).read_text())["files"]
    files["model"]["path"] = path
    edit_manifest(artifact_copy, resign=True, files=files)
    with pytest.raises(npu.ArtifactError, match="breaks the manifest's schema at files/model/path"):
        npu.Artifact.load(artifact_copy)


def test_a_link_that_leaves_the_folder_is_refused(artifact_copy: Path, tmp_path: Path) -> None:
    shutil.move(artifact_copy / "model.onnx", tmp_path / "outside.onnx")
    (artifact_copy / "model.onnx").symlink_to(tmp_path / "outside.onnx")
    with pytest.raises(npu.ArtifactError, match=r"leaves the artifact's folder(.|\n)*outside.onnx"):
        npu.Artifact.load(artifact_copy)


def test_an_unknown_role_lists_the_known(compiled: npu.Artifact) -> None:
    with pytest.raises(npu.ArtifactError, match=r"no file for 'weights'(.|\n)*'model', 'probe', 'reference'"):
        compiled.file("weights")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "a.npu", overwrite=False) as folder:
            (folder / "model.onnx").write_bytes(b"half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_overwriting_is_asked_for_and_keeps_the_old_until_the_new_is_there(artifact_copy: Path) -> None:
    before = npu.Artifact.load(artifact_copy)
    with pytest.raises(npu.ArtifactError, match="exists already"), new_folder(artifact_copy, overwrite=False):
        pass
    with pytest.raises(RuntimeError), new_folder(artifact_copy, overwrite=True):
        raise RuntimeError
    assert npu.Artifact.load(artifact_copy).fingerprint == before.fingerprint
    with new_folder(artifact_copy, overwrite=True) as folder:
        (folder / "new").write_text("")
    assert [p.name for p in artifact_copy.iterdir()] == ["new"]
    assert [p.name for p in artifact_copy.parent.iterdir()] == [artifact_copy.name]


def test_a_folder_that_is_no_artifact_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    refused = pytest.raises(npu.ArtifactError, match="is not an artifact, so it is not overwritten")
    with refused, new_folder(tmp_path / "mine", overwrite=True):
        pass
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
