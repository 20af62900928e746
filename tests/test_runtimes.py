"""Runtimes are found by entry point, say why they cannot run, and are held to their names."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from conftest import make_images
from onnx import TensorProto, helper

import lightning_npu as npu
from lightning_npu.artifact import MANIFEST
from lightning_npu.runtimes import base
from lightning_npu.runtimes.cpu import _flags, exact_u8s8, instruction_set
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec


def test_available_names_the_embedded_default() -> None:
    answers = npu.runtimes.available()
    assert answers["onnx"].startswith("ok: onnxruntime ")
    assert instruction_set() in answers["onnx"]


def test_an_unknown_runtime_lists_the_known(compiled: npu.Artifact) -> None:
    with pytest.raises(npu.RuntimeUnavailableError, match=r"no runtime named 'onxx'(.|\n)*\['onnx'"):
        npu.runtimes.open_runtime(compiled, "onxx")


def test_a_missing_package_is_one_sentence(compiled: npu.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as Python marks what cannot be imported
    with pytest.raises(
        npu.RuntimeUnavailableError, match=r"needs the package onnxruntime(.|\n)*pip install onnxruntime"
    ):
        npu.runtimes.open_runtime(compiled, "onnx")


def test_a_machine_without_onnxruntime_is_told_what_to_install(compiled: npu.Artifact) -> None:
    """In a process where the package really cannot be found."""
    script = textwrap.dedent(f"""
        import sys
        sys.modules["onnxruntime"] = None
        import lightning_npu as npu
        from lightning_npu.errors import NPUError
        try:
            npu.NPUFrozenModule({str(compiled.path)!r}).describe()
        except NPUError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install onnxruntime" in done.stdout, done.stderr


def test_only_artifacts_for_it_are_opened(compiled: npu.Artifact) -> None:
    manifest = {**compiled.manifest, "target": "mobilint"}
    foreign = npu.Artifact(**{**vars(compiled), "manifest": manifest})
    with pytest.raises(npu.RuntimeUnavailableError, match=r"cannot execute an artifact for target 'mobilint'"):
        npu.runtimes.open_runtime(foreign, "onnx")
    with pytest.raises(
        npu.RuntimeUnavailableError, match=r"No runtime on this machine(.|\n)*no registered runtime takes"
    ):
        npu.runtimes.open_runtime(foreign)


PLUGIN = """
    from lightning_npu.runtimes import Runtime
    from lightning_npu.runtimes.onnx import OnnxRuntime

    class Echo(OnnxRuntime):
        name = "echo"

        @classmethod
        def available(cls):
            return "ok: echo"
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a third party's package with runtimes into a folder on the path."""
    info = tmp_path / "site" / "echo_runtime-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lightning_npu.runtimes]\necho = echo_runtime:Echo\nbroken = echo_runtime:Missing\nodd = echo_runtime:__doc__\n"
    )
    (tmp_path / "site" / "echo_runtime.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    base._entry_points.cache_clear()
    yield
    base._entry_points.cache_clear()
    sys.modules.pop("echo_runtime", None)


@pytest.mark.usefixtures("plugin")
def test_a_third_party_adds_a_runtime(compiled: npu.Artifact) -> None:
    answers = npu.runtimes.available()
    assert answers["echo"] == "ok: echo"
    assert "cannot be imported" in answers["broken"]
    assert "is no Runtime" in answers["odd"]
    frozen = npu.NPUFrozenModule(compiled, runtime="echo")
    assert frozen(make_images(2))[0].shape == (2, 16, 8)
    assert frozen.describe()["runtime"] == "echo"
    assert npu.NPUFrozenModule(compiled).describe()["runtime"] == "onnx"  # a runtime of the target's name comes first
    frozen.close()


# ---- ONNX Runtime


def identity_model(path: Path, *, external: bool = False) -> Path:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    if external:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "../../../../etc/passwd"), ("length", "8")):
            entry = weight.external_data.add()
            entry.key, entry.value = key, value
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, ["batch", 2])],
        [value("y", TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


SPECS = ((TensorSpec("x", (None, 2)),), (TensorSpec("y", (None, 2)),))


def test_outputs_are_not_overwritten_by_later_calls(tmp_path: Path) -> None:
    runtime = OnnxRuntime(identity_model(tmp_path / "m.onnx"), *SPECS)
    results = [runtime.run([torch.full((3, 2), float(i))])[0] for i in range(4)]
    assert [result[0, 0].item() for result in results] == [0.0, 1.0, 2.0, 3.0]
    runtime.close()
    with pytest.raises(npu.DeviceError, match="Runtime 'onnx' was closed"):
        runtime.run([torch.zeros(1, 2)])


def test_inputs_are_read_where_torch_keeps_them(tmp_path: Path) -> None:
    runtime = OnnxRuntime(identity_model(tmp_path / "m.onnx"), *SPECS)
    x = torch.ones(3, 2)
    before = x.data_ptr()
    result = runtime.run([x])[0]
    assert x.data_ptr() == before
    assert result.tolist() == [[1.0, 2.0]] * 3


def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not onnx at all")
    with pytest.raises(npu.ArtifactError, match=r"cannot load .*m.onnx"):
        OnnxRuntime(tmp_path / "m.onnx", *SPECS)


def test_a_graph_that_reads_another_file_is_refused(artifact_copy: Path) -> None:
    import json

    from lightning_npu.artifact import _sha256_json, sha256_file

    path = identity_model(artifact_copy / "model.onnx", external=True)
    manifest = json.loads((artifact_copy / MANIFEST).read_text())
    manifest["files"]["model"] |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    from lightning_npu.artifact import _fingerprint

    manifest["fingerprint"] = _fingerprint(manifest)
    manifest["manifest_sha256"] = _sha256_json(manifest)
    (artifact_copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(npu.ArtifactError, match=r"reads weights from another file(.|\n)*tensor 'w' lies outside"):
        npu.NPUFrozenModule(artifact_copy).describe()


def test_threads_default_to_half_of_the_cores(tmp_path: Path, compiled: npu.Artifact) -> None:
    from lightning_npu.runtimes.cpu import available_cores

    runtime = OnnxRuntime.open(compiled)
    assert runtime.threads == max(1, available_cores() // 2)
    runtime.close()
    frozen = npu.NPUFrozenModule(compiled, runtime_options={"threads": 1, "spin": True})
    with pytest.raises(npu.InputError, match=r"no such options(.|\n)*\['spin'\]"):
        frozen(make_images(1))
    with pytest.raises(npu.RuntimeUnavailableError, match="one device, the CPU"):
        npu.NPUFrozenModule(compiled, device_index=1).describe()


# ---- the processor


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni", {"avx2", "avx512_vnni"}),
        ("Features\t: fp asimddp", {"asimddp"}),
        ("x: y", set()),
    ],
)
def test_flags_are_read_from_the_operating_system(tmp_path: Path, line: str, flags: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert {"fpu", "fp", *_flags(tmp_path / "cpuinfo")} >= flags
    assert _flags(tmp_path / "none") == set()


def test_saturation_depends_on_the_instruction_set() -> None:
    assert exact_u8s8("x86_64-avx512_vnni")
    assert exact_u8s8("aarch64-asimddp")
    assert not exact_u8s8("x86_64-avx2")
    assert not exact_u8s8("riscv64-unknown")


def test_onnx_is_what_wrote_the_model(compiled: npu.Artifact) -> None:
    model = onnx.load(str(compiled.file("model")))
    assert any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
