"""Runtimes are found by entry point, say why they cannot run, and are held to their names."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import make_images
from onnx import TensorProto, helper

import lightning_npu as npu
from lightning_npu.manifest import MANIFEST, fingerprint, sha256_file, sha256_json
from lightning_npu.remeasure import load_probe
from lightning_npu.runtimes import base
from lightning_npu.runtimes.cpu import _flags, exact_u8s8, instruction_set
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec


def test_available_names_the_embedded_default() -> None:
    answers = npu.runtimes.available()
    assert answers["onnx"].startswith("ok: onnxruntime ")
    assert instruction_set() in answers["onnx"]


def test_an_unknown_runtime_lists_the_known(compiled: npu.Artifact) -> None:
    with pytest.raises(npu.RuntimeUnavailableError, match=r"no runtime named 'onxx'(.|\n)*'onnx'"):
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
    manifest = {**compiled.manifest, "target": "openvino"}
    foreign = npu.Artifact(**{**vars(compiled), "manifest": manifest})
    with pytest.raises(npu.RuntimeUnavailableError, match=r"cannot execute an artifact for target 'openvino'"):
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
        "[lightning_npu.runtimes]\n"
        "echo = echo_runtime:Echo\nbroken = echo_runtime:Missing\nodd = echo_runtime:__doc__\n"
    )
    (tmp_path / "site" / "echo_runtime.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    base.RUNTIMES.forget()
    yield
    base.RUNTIMES.forget()
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


def identity_model(path: Path) -> Path:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
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
    with pytest.raises(npu.ArtifactError, match=r"m.onnx is no ONNX model"):
        OnnxRuntime(tmp_path / "m.onnx", *SPECS)


def replace_model(folder: Path, content: bytes) -> None:
    """Put another file in place of the model, with fitting checksums."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / "model.onnx").write_bytes(content)
    manifest["files"]["model"] |= {"sha256": sha256_file(folder / "model.onnx"), "bytes": len(content)}
    manifest["fingerprint"] = fingerprint(manifest)
    manifest["manifest_sha256"] = sha256_json(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def outside() -> TensorProto:
    """A tensor whose values are read from the file ``extra.bin``."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "extra.bin"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def model_with(place: str) -> onnx.ModelProto:
    """A model that reads another file's values in one of the places where a graph can hold tensors."""
    x, y, c = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y", "c"))
    constant = helper.make_node("Constant", [], ["c"], value=outside())
    add = helper.make_node("Add", ["x", "c"], ["y"])
    functions, weights, sparse = [], [], []
    if place == "attribute":
        nodes = [constant, add]
    elif place == "subgraph":
        inner = helper.make_graph([constant], "inner", [], [c])
        true = helper.make_node("Constant", [], ["t"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))
        choose = helper.make_node("If", ["t"], ["c2"], then_branch=inner, else_branch=inner)
        nodes = [true, choose, helper.make_node("Add", ["x", "c2"], ["y"])]
    elif place == "subgraph weight":
        inner = helper.make_graph([helper.make_node("Identity", ["w"], ["c"])], "inner", [], [c], [outside()])
        nodes = [helper.make_node("If", ["t"], ["y"], then_branch=inner, else_branch=inner)]
    elif place == "function":
        functions = [helper.make_function("own", "F", ["x"], ["y"], [constant, add], [helper.make_opsetid("", 20)])]
        nodes = [helper.make_node("F", ["x"], ["y"], domain="own")]
    elif place == "sparse weight":
        sparse = [onnx.SparseTensorProto(values=outside(), dims=[2])]
        nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    else:
        weights, nodes = [outside()], [helper.make_node("Add", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], weights, sparse_initializer=sparse)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)


@pytest.mark.parametrize("place", ["weight", "sparse weight", "attribute", "subgraph", "subgraph weight", "function"])
def test_a_graph_that_reads_another_file_is_refused(artifact_copy: Path, place: str) -> None:
    replace_model(artifact_copy, model_with(place).SerializeToString())
    (artifact_copy / "extra.bin").write_bytes(bytes(8))
    refused = pytest.raises(npu.ArtifactError, match=r"reads weights from another file(.|\n)*tensor 'w' lies outside")
    with refused:
        npu.NPUFrozenModule(artifact_copy).describe()
    with refused:
        OnnxRuntime(artifact_copy / "model.onnx", *SPECS)


@pytest.mark.parametrize("content", [b"", b"not onnx at all", b"\x08\x09" * 40])
def test_a_model_file_that_is_no_onnx_is_refused_on_opening(artifact_copy: Path, content: bytes) -> None:
    replace_model(artifact_copy, content)
    with pytest.raises(npu.ArtifactError, match=r"model.onnx(.|\n)*What to do") as caught:
        npu.NPUFrozenModule(artifact_copy).describe()
    assert "compile the module again" in str(caught.value)


def test_threads_default_to_half_of_the_cores(compiled: npu.Artifact) -> None:
    from lightning_npu.runtimes.cpu import available_cores

    runtime = OnnxRuntime.open(compiled)
    assert runtime.threads == max(1, available_cores() // 2)
    runtime.close()
    runtime = OnnxRuntime.open(compiled, threads=1)
    assert runtime.threads == 1
    runtime.close()


# ---- a choice is checked before anything is opened

WRONG_CHOICES = [
    ({"runtime": "onxx"}, npu.RuntimeUnavailableError, r"no runtime named 'onxx'(.|\n)*'onnx'(.|\n)*spelling"),
    ({"runtime": None}, npu.InputError, r"chosen by its name(.|\n)*Got: None(.|\n)*from_runtime"),
    ({"options": {"spin": True}}, npu.InputError, r"no such options(.|\n)*\['threads'\](.|\n)*\['spin'\]"),
    ({"options": {"role": "reference"}}, npu.InputError, r"no such options(.|\n)*\['role'\]"),
    ({"options": {"device_index": 0}}, npu.InputError, r"no such options(.|\n)*\['device_index'\]"),
    ({"options": {"threads": -3}}, npu.InputError, r"threads is wrong(.|\n)*from 1 to 1024(.|\n)*Got: -3"),
    ({"options": {"threads": 0}}, npu.InputError, r"threads is wrong(.|\n)*Got: 0"),
    ({"options": {"threads": "2"}}, npu.InputError, r"threads is wrong(.|\n)*Got: '2'"),
    ({"options": {"threads": True}}, npu.InputError, r"threads is wrong(.|\n)*Got: True"),
    ({"options": {"threads": 1.0}}, npu.InputError, r"threads is wrong(.|\n)*Got: 1.0"),
    ({"options": {"threads": 10**10}}, npu.InputError, r"threads is wrong(.|\n)*Got: 10000000000"),
    ({"options": "threads=2"}, npu.InputError, r"options by name(.|\n)*Got: 'threads=2'"),
    ({"options": {2: 2}}, npu.InputError, r"options by name(.|\n)*Got: {2: 2}"),
    ({"device_index": 1}, npu.RuntimeUnavailableError, r"one device, the CPU(.|\n)*Got: 1"),
    ({"device_index": -1}, npu.InputError, r"device_index is negative(.|\n)*Got: -1"),
    ({"device_index": "0"}, npu.InputError, r"device_index is wrong(.|\n)*Got: '0'"),
]


def check(artifact: npu.Artifact, runtime: Any = "onnx", device_index: Any = None, options: Any = None) -> None:
    base.check_choice(artifact, runtime, device_index, options)


@pytest.mark.parametrize(("choice", "error", "message"), WRONG_CHOICES)
def test_a_wrong_choice_is_refused_before_a_device_is_opened(
    compiled: npu.Artifact, choice: dict[str, Any], error: type[Exception], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(OnnxRuntime, "__init__", lambda *_, **__: pytest.fail("a device was opened"))
    with pytest.raises(error, match=message):
        check(compiled, **choice)
    if "runtime" not in choice:
        with pytest.raises(npu.NPUError):
            check(compiled, "auto", choice.get("device_index"), choice.get("options"))
    options = choice.get("options", {})
    if isinstance(options, dict) and all(isinstance(key, str) for key in options) and "device_index" not in options:
        with pytest.raises(error, match=message):  # who opens without having checked hears the same
            npu.runtimes.open_runtime(
                compiled, choice.get("runtime", "onnx"), device_index=choice.get("device_index"), **options
            )


def test_right_choices_pass(compiled: npu.Artifact) -> None:
    for runtime in ("auto", "onnx"):
        for device_index in (None, 0):
            for options in (None, {}, {"threads": 2}, {"threads": None}):
                check(compiled, runtime, device_index, options)
    foreign = npu.Artifact(**{**vars(compiled), "manifest": {**compiled.manifest, "target": "openvino"}})
    check(foreign, "auto")  # somewhere else there may be a runtime for it
    with pytest.raises(npu.RuntimeUnavailableError, match="cannot execute an artifact for target 'openvino'"):
        check(foreign, "onnx")


def test_checking_a_choice_imports_no_runtime(compiled: npu.Artifact) -> None:
    script = textwrap.dedent(f"""
        import sys
        import lightning_npu as npu
        from lightning_npu.runtimes.base import check_choice
        artifact = npu.Artifact.load({str(compiled.path)!r})
        check_choice(artifact, "auto", None, {{"threads": 1}})
        try:
            check_choice(artifact, "auto", None, {{"thread": 1}})
        except npu.InputError:
            print("refused", [name for name in ("onnx", "onnxruntime") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused []"


@pytest.mark.usefixtures("plugin")
def test_a_third_partys_options_are_checked_by_it(compiled: npu.Artifact) -> None:
    check(compiled, "echo", None, {"threads": 2})
    with pytest.raises(npu.InputError, match=r"Runtime 'echo' has no such options(.|\n)*\['volume'\]"):
        check(compiled, "echo", None, {"volume": 11})
    with pytest.raises(npu.RuntimeUnavailableError, match="cannot be imported"):
        check(compiled, "broken")
    check(compiled, "auto")  # what is broken does not stand in the way of what is not


# ---- judging samples


def replace_probe(folder: Path, content: bytes) -> npu.Artifact:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / "probe.npz").write_bytes(content)
    manifest["files"]["probe"] |= {"sha256": sha256_file(folder / "probe.npz"), "bytes": len(content)}
    manifest["manifest_sha256"] = sha256_json(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return npu.Artifact.load(folder)


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


GOOD = npz(images=make_images(2).numpy())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "EOFError"),
        (GOOD[:-30], "BadZipFile"),
        (GOOD[:300] + bytes([GOOD[300] ^ 1]) + GOOD[301:], "BadZipFile"),
        (b"not a zip file", "ValueError"),
        (npz(other=np.zeros(3)), "KeyError: 'images"),
        (npz(images=np.zeros((2, 3, 8, 8), np.float32)), "Input 'images' has the wrong shape"),
        (npz(images=np.zeros((2, 3, 16, 16), np.int64)), "Input 'images' has the wrong dtype"),
        (npz(images=np.zeros((0, 3, 16, 16), np.float32)), "ValueError: it holds no samples"),
        (npz(images=np.array(["a"])), "TypeError"),
        (npz(images=np.array([{}], dtype=object)), "ValueError: Object arrays cannot be loaded"),
    ],
    ids=lambda value: str(value)[:16].encode("ascii", "replace").decode() if isinstance(value, str) else "",
)
def test_a_damaged_probe_is_refused(artifact_copy: Path, content: bytes, reason: str) -> None:
    artifact = replace_probe(artifact_copy, content)
    message = rf"probe.npz does not hold the artifact's judging samples: {reason}(.|\n)*'images' \[batch, 3, 16, 16\]"
    with pytest.raises(npu.ArtifactError, match=message) as caught:
        load_probe(artifact)
    assert "copy the artifact again" in str(caught.value)


def test_a_whole_probe_is_read(artifact_copy: Path) -> None:
    assert torch.equal(load_probe(replace_probe(artifact_copy, GOOD))[0], make_images(2))


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
