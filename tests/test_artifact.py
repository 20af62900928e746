"""A damaged, edited, foreign or newer artifact is refused by name, and writing leaves nothing half done."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import lightning_npu as npu
from lightning_npu.cli import _describe
from lightning_npu.manifest import MANIFEST, fingerprint, sha256_json


def sign(manifest: Any) -> None:
    """Make the checksums fit, as far as there is something that they could fit."""
    try:
        manifest["fingerprint"] = fingerprint(manifest)
        manifest["manifest_sha256"] = sha256_json(manifest)
    except (KeyError, TypeError, ValueError, RecursionError):
        pass


def edit_manifest(folder: Path, *, resign: bool = False, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(changes)
    if resign:
        sign(manifest)
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


# ---- manifests with fitting checksums that were not written by this package

LEAF = {"kind": "tensor", "index": 0}
NULL = {"kind": "constant", "value": None}


def named(kind: str, keys: Any, count: int = 1, name: Any = "Out") -> dict[str, Any]:
    return {"kind": kind, "keys": keys, "items": [LEAF] * count, "type": name}


def deep(levels: int) -> dict[str, Any]:
    node: dict[str, Any] = LEAF
    for _ in range(levels):
        node = {"kind": "tuple", "items": [node]}
    return node


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"kind": "tensor"}, "'index' is a required property"),
        ({"kind": "constant"}, "'value' is a required property"),
        ({"kind": "opaque", "value": 3}, "3 is not of type 'string'"),
        ({"kind": "tuple"}, "'items' is a required property"),
        ({"kind": "dict", "items": [LEAF]}, "'keys' is a required property"),
        ({"kind": "set", "items": []}, "'set' is not one of"),
        ({"kind": "tensor", "index": 99}, r"tensors that are not there(.|\n)*indices below 3(.|\n)*\[99\]"),
        (named("dict", [["a"]]), r"structure/keys/0: \['a'\] is not of type"),
        (named("dict", ["a", "b"]), r"one key per item(.|\n)*Expected: 1 keys"),
        (named("dict", [1, True], 2), "not unique primitives"),
        (named("namedtuple", ["a", "a"], 2), "not unique primitives"),
        (named("namedtuple", ["_a"]), "starts with an underscore"),
        (named("namedtuple", ["def"]), "no identifiers"),
        (named("namedtuple", ["a"], name="x y"), "no identifiers"),
        (named("namedtuple", ["a"], name=None), "None is not of type 'string'"),
        (deep(40), "nested deeper than 64 levels"),
        (deep(300), "nested deeper than 64 levels"),
    ],
)
def test_a_structure_that_cannot_be_is_refused(artifact_copy: Path, structure: Any, message: str) -> None:
    edit_manifest(artifact_copy, resign=True, structure=structure)
    with pytest.raises(npu.ArtifactError, match=message) as caught:
        npu.Artifact.load(artifact_copy)
    assert "compile the module again" in str(caught.value)


def test_outputs_nested_as_deep_as_anybody_nests_them_are_read(artifact_copy: Path) -> None:
    edit_manifest(artifact_copy, resign=True, structure=deep(30))
    assert npu.Artifact.load(artifact_copy).structure.to_json() == deep(30)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("inputs/0/batch_axis", 9, r"no axis 9(.|\n)*an axis of its shape \[None, 3, 16, 16\]"),
        ("inputs/0/shape/1", 10**300, "is greater than the maximum"),
        ("inputs/0/dtype", "complex64", "is not one of"),
        ("outputs/1/name", "output_0", r"Two outputs have one name(.|\n)*\['output_0'\]"),
        ("outputs/1/name", "other", r"figures of outputs that are not there(.|\n)*\['output_1'\]"),
        ("signature/0/value/index", 1, r"every input once(.|\n)*tensors 0 to 0(.|\n)*\[1\]"),
        ("signature/0/value", NULL, r"every input once(.|\n)*Got: \[\]"),
        ("signature/1/name", "images", "Two parameters have one name"),
        ("signature/1/kind", "var_keyword", "does not hold what its kind says"),
        ("fidelity/outputs/output_0/sqnr_db", 10**300, "is greater than the maximum"),
        ("fidelity/outputs/output_0/sqnr_db", 10**400, "is damaged: 1000.* is no finite number"),
        ("fidelity/outputs/output_0/cosine", "NAN", "is damaged: NaN is no finite number"),
        ("recipe/x", "INFINITY", "is damaged: -Infinity is no finite number"),
        ("recipe/x", "LARGE", "is damaged: 1e999 is no finite number"),
        ("recipe/x", "\ud800", "is damaged: .*surrogates not allowed"),
        ("source", {"module": "m", "parameters": 1, "state": {}}, "'submodule' is a required property"),
        ("files/model/path", "m" * 5000, "is too long"),
        ("files/model/path", "m" * 200, r"File 'model' of .* is missing"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode(),
)
def test_an_entry_that_cannot_be_is_refused(artifact_copy: Path, entry: str, value: Any, message: str) -> None:
    manifest = json.loads((artifact_copy / MANIFEST).read_text())
    *parents, last = [int(part) if part.isdigit() else part for part in entry.split("/")]
    place = manifest
    for part in parents:
        place = place[part]
    place[last] = value
    sign(manifest)
    text = json.dumps(manifest)
    for word, token in (("NAN", "NaN"), ("INFINITY", "-Infinity"), ("LARGE", "1e999")):
        text = text.replace(f'"{word}"', token)
    (artifact_copy / MANIFEST).write_text(text)
    with pytest.raises(npu.ArtifactError, match=message) as caught:
        npu.Artifact.load(artifact_copy)
    assert len(str(caught.value)) < 2000
    assert "What to do: " in str(caught.value)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from([2**70, -(10**30)]), st.text(max_size=3),
        st.floats(), st.sampled_from(["tensor", "constant", "opaque", "dict", "namedtuple", "record", "list"]),
        st.sampled_from(["var_positional", "var_keyword", "keyword", "output_0", "images", "model.onnx", "float64"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["kind", "index", "items", "keys", "value", "type", "path", "x"]), inner),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_manifest_crashes_the_reader(artifact_copy: Path, compiled: npu.Artifact, data: st.DataObject) -> None:
    """Whatever is in it, with fitting checksums: it is an artifact that can be shown and built, or it is refused."""
    manifest = copy.deepcopy(dict(compiled.manifest))
    manifest["source"] = {**manifest["source"], "state": {}}  # the mutations should hit something else
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(places(manifest)[1:]))
        place = manifest
        for part in parents:
            place = place[part]
        change = data.draw(st.sampled_from(["replace", "delete", "copy", "add"]))
        if change == "delete":
            del place[last]
        elif change == "add" and isinstance(place[last], dict):
            place[last][data.draw(st.text(max_size=5))] = data.draw(json_values)
        elif change == "add" and isinstance(place[last], list):
            place[last].append(data.draw(st.sampled_from(place[last])) if place[last] else data.draw(json_values))
        elif change == "copy":
            source = manifest
            for part in data.draw(st.sampled_from(places(manifest)[1:])):
                source = source[part]
            place[last] = copy.deepcopy(source)
        else:
            place[last] = data.draw(json_values)
        if not places(manifest)[1:]:
            break
    sign(manifest)
    (artifact_copy / MANIFEST).write_text(json.dumps(manifest))
    try:
        artifact = npu.Artifact.load(artifact_copy)
    except npu.ArtifactError:
        return
    assert _describe(artifact).encode()
    assert artifact.signature.describe()
    assert artifact.signature.tensor_names()
    tensors = [torch.zeros(1) for _ in (*artifact.outputs, *artifact.inputs)]
    artifact.structure.build(tensors)
    for spec in (*artifact.inputs, *artifact.outputs):
        spec.samples(torch.zeros(spec.with_batch(0))) if len(spec.shape) < 5 and max(spec.with_batch(0)) < 99 else None


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60))
@example(content=b'{"format": "\xff"}')
def test_no_file_crashes_the_reader(artifact_copy: Path, content: bytes) -> None:
    (artifact_copy / MANIFEST).write_bytes(content)
    with pytest.raises(npu.ArtifactError, match="What to do"):
        npu.Artifact.load(artifact_copy)


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000, "nul\0byte"])
def test_a_path_that_no_file_system_takes_is_refused(path: str) -> None:
    with pytest.raises(npu.ArtifactError, match=r"cannot be read: (File name too long|.*null)") as caught:
        npu.Artifact.load(path)
    assert len(str(caught.value)) < 1000


def test_a_link_that_leads_nowhere_or_in_a_circle_is_refused(artifact_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "gone.npu").symlink_to(tmp_path / "nowhere")
    with pytest.raises(npu.ArtifactError, match="There is no artifact at"):
        npu.Artifact.load(tmp_path / "gone.npu")
    (artifact_copy / "model.onnx").unlink()
    (artifact_copy / "model.onnx").symlink_to("model.onnx")
    with pytest.raises(npu.ArtifactError, match=r"File 'model' of .* (cannot be read|is missing)"):
        npu.Artifact.load(artifact_copy)


# ---- what happens to a folder between loading and opening


def test_a_replaced_artifact_is_not_opened(artifact_copy: Path, compiled_fp32: npu.Artifact) -> None:
    frozen = npu.NPUFrozenModule(artifact_copy)
    loaded = npu.Artifact.load(artifact_copy)
    loaded.verify()
    shutil.rmtree(artifact_copy)
    shutil.copytree(compiled_fp32.path, artifact_copy)
    message = (
        rf"was replaced since it was loaded(.|\n)*Expected: fingerprint {loaded.fingerprint}"
        rf"(.|\n)*Got: fingerprint {compiled_fp32.fingerprint}"
    )
    with pytest.raises(npu.ArtifactError, match=message):
        loaded.verify()
    with pytest.raises(npu.ArtifactError, match=message):
        frozen.describe()


def test_a_file_that_was_damaged_after_loading_is_not_opened(artifact_copy: Path) -> None:
    loaded = npu.Artifact.load(artifact_copy)
    content = bytearray((artifact_copy / "model.onnx").read_bytes())
    content[100] ^= 1
    (artifact_copy / "model.onnx").write_bytes(content)
    with pytest.raises(npu.ArtifactError, match="its SHA-256 is wrong"):
        npu.runtimes.open_runtime(loaded)


def test_a_moved_artifact_says_where_it_was(artifact_copy: Path, tmp_path: Path) -> None:
    frozen = npu.NPUFrozenModule(artifact_copy)
    artifact_copy.rename(tmp_path / "elsewhere.npu")
    with pytest.raises(npu.ArtifactError, match=rf"moved or deleted(.|\n)*at {artifact_copy}\n(.|\n)*its new path"):
        frozen.describe()
    with pytest.raises(npu.ArtifactError, match=rf"no artifact at {artifact_copy}(.|\n)*give its new path"):
        npu.NPUFrozenModule(artifact_copy)
    npu.Artifact.load(tmp_path / "elsewhere.npu").verify()
