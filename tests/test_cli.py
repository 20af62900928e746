"""The command says what the machine can do, compiles, and reads artifacts back; errors are text, not tracebacks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from conftest import make_images
from stubs import StubBoard, StubNvml

import lightning_npu as npu
from lightning_npu.cli import main
from lightning_npu.cli_data import calibration_batches
from lightning_npu.doctor import examine

TESTS = Path(__file__).parent


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)


def test_doctor_finds_the_embedded_default() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "[ok]  runtime onnx" in result.output
    assert any(line.startswith("[") and " gpu " in line for line in result.output.splitlines())


def test_doctor_gives_a_remedy_for_all_that_is_missing() -> None:
    findings = json.loads(run("doctor", "--json").output)
    assert {"machine", "runtime", "power", "package"} <= {finding["kind"] for finding in findings}
    assert all(finding["text"] for finding in findings)
    assert len(findings) == len(examine())


def test_doctor_lists_power_sensors(stub_nvml: Callable[..., StubNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stub_nvml([StubBoard(name="Stub H100")])
    lines = run("doctor").output.splitlines()
    assert any(re.match(r"\[ok\]  power sensors nvml +Stub H100 \(counter and power\)$", line) for line in lines)
    assert any(re.match(r"\[..\]  power sensors rapl ", line) for line in lines)


def test_doctor_without_any_runtime_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_npu.doctor.available", lambda: {"onnx": "not installed: pip install onnxruntime"})
    result = run("doctor")
    assert result.exit_code == 1
    assert "[--]  runtime onnx" in result.output
    assert "pip install onnxruntime" in result.output


@pytest.mark.usefixtures("in_tests")
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_compile_from_a_file_and_inspect(tmp_path: Path, suffix: str) -> None:
    images = make_images(40).numpy()
    data = tmp_path / f"data{suffix}"
    if suffix == ".npy":
        np.save(data, images)
    else:
        np.savez(data, images=images)
    output = tmp_path / "encoder.npu"
    result = run("compile", "conftest:make_encoder", "--calibration", data, "-o", output, "--min-sqnr-db", 10)
    assert result.exit_code == 0, result.output
    assert "precision    a8w8, recipe 'faithful'" in result.output
    again = run("inspect", output, "--measure")
    assert again.exit_code == 0, again.output
    assert "measured now on CPU" in again.output
    manifest = npu.Artifact.load(output).manifest
    assert json.loads(run("inspect", output, "--json").output) == manifest
    both = json.loads(run("inspect", output, "--json", "--measure").output)  # one document
    measured = both.pop("measured")
    assert both == manifest
    assert measured["device"].startswith("CPU")
    assert measured["outputs"]["output_0"]["sqnr_db"] > 10


@pytest.mark.usefixtures("in_tests")
def test_compile_a_head_from_a_loader(tmp_path: Path) -> None:
    output = tmp_path / "head.npu"
    result = run(
        "compile", "conftest:make_encoder", "--calibration", "test_cli:calibration", "-o", output,
        "--cut", "stem", "--precision", "fp32", "--batch-size", 2,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    artifact = npu.Artifact.load(output)
    assert artifact.manifest["source"]["cut"] == "stem"
    assert artifact.inputs[0].shape == (2, 3, 16, 16)


def calibration() -> list[object]:
    return list(make_images(16).split(4))


CODE = """
import sys
import numpy, torch, conftest

images = conftest.make_images(40)
array = images.double().numpy()
by_name = {"images": images, "scale": torch.ones(40)}
text = "images"
nothing = []

def needs_more(size): ...
def fails(): raise OSError("no weights here")
def leaves(): sys.exit(2)

def endless():
    while True:
        yield images[:8]

def breaks():
    yield images[:8]
    raise RuntimeError("disk gone")
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the user's modules, as the working directory."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "user_data.py").write_text(CODE)
    (folder / "user_typo.py").write_text("def build(:\n")
    (folder / "user_broken.py").write_text("raise RuntimeError('no licence')\n")
    (folder / "user_exits.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(folder)
    yield folder
    for name in ("user_data", "user_typo", "user_broken", "user_exits"):
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (
            "conftest:make_encoder",
            "conftest:no_such_name",
            r"'conftest:no_such_name' cannot be imported(.|\n)*check the spelling",
        ),
        ("conftest:no_such_name", "user_data:images", r"cannot be imported"),
        ("no_such_module:x", "user_data:images", r"cannot be imported: ModuleNotFoundError: No module named"),
        ("conftest", "user_data:images", r"does not name a Python object\.\n  Expected: MODULE:NAME"),
        (":x", "user_data:images", r"':x' does not name a Python object"),
        (".mm:x", "user_data:images", r"'.mm:x' does not name a Python object"),
        ("x:", "user_data:images", r"'x:' does not name a Python object"),
        ("x:a..b", "user_data:images", r"'x:a..b' does not name a Python object"),
        ("user_typo:build", "user_data:images", r"cannot be imported: SyntaxError: .*user_typo.py, line 1"),
        ("user_broken:x", "user_data:images", r"RuntimeError: no licence \(.*user_broken.py:1\)"),
        ("user_exits:x", "user_data:images", r"cannot be imported: SystemExit: 3"),
        ("user_data:needs_more", "user_data:images", r"cannot build a module: TypeError: .*'size'\.\n.*no arguments"),
        (
            "user_data:fails",
            "user_data:images",
            r"cannot build a module: OSError: no weights here \(.*user_data.py:12\)",
        ),
        ("user_data:leaves", "user_data:images", r"cannot build a module: SystemExit: 2"),
        ("user_data:endless", "user_data:images", r"gives no nn.Module(.|\n)*Got: generator"),
        ("conftest:make_encoder", "user_data:text", r"gives no calibration data(.|\n)*Got: str"),
        ("conftest:make_encoder", "user_data:nothing", r"user_data:nothing gives no inputs"),
        ("conftest:make_encoder", "user_data:fails", r"cannot give calibration data: OSError: no weights"),
        ("conftest:make_encoder", "user_data:breaks", r"failed while it was read: RuntimeError: disk gone \(.*:21\)"),
        ("conftest:make_encoder", "no_such_file.npy", r"no_such_file.npy cannot be read"),
        ("conftest:make_encoder", "scalar.npy", r"one entry per sample(.|\n)*the data: \[\]"),
        ("conftest:make_encoder", "text.npy", r"holds values that no input can take(.|\n)*float32(.|\n)*Got: <U1"),
        ("conftest:make_encoder", "unequal.npz", r"one entry per sample(.|\n)*images: \[40, 3, 16, 16\], scale: \[3\]"),
        ("conftest:make_encoder", "empty.npy", r"empty.npy gives no inputs"),
        ("conftest:make_encoder", "none.npz", r"none.npz gives no inputs"),
        ("conftest:make_encoder", "cut.npz", r"cut.npz cannot be read: BadZipFile"),
        ("conftest:make_encoder", "zero.npy", r"zero.npy cannot be read: EOFError"),
        ("conftest:make_encoder", "pickled.npy", r"pickled.npy cannot be read: ValueError: Object arrays"),
    ],
)
def test_compile_errors_are_text(tmp_path: Path, module: str, data: str, message: str) -> None:
    images = make_images(40).numpy()
    np.save("scalar.npy", np.float32(1))
    np.save("text.npy", np.array(["a", "b"]))
    np.savez("unequal.npz", images=images, scale=np.ones(3, np.float32))
    np.save("empty.npy", images[:0])
    np.savez("none.npz")
    np.savez("whole.npz", images=images)
    Path("cut.npz").write_bytes(Path("whole.npz").read_bytes()[:-40])
    Path("zero.npy").write_bytes(b"")
    np.save("pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    result = run("compile", module, "--calibration", data, "-o", tmp_path / "x.npu")
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert re.search(message, result.output), result.output
    assert "What to do: " in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["user"]


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    "data", ["user_data:images", "user_data:array", "user_data:endless", "big_endian.npy", "half.npy"]
)
def test_compile_takes_data_as_it_lies_about(tmp_path: Path, data: str) -> None:
    np.save("big_endian.npy", make_images(40).numpy().astype(">f8"))
    np.save("half.npy", make_images(40).numpy().astype(np.float16))
    output = tmp_path / "x.npu"
    options = ("--precision", "fp32", "--min-sqnr-db", 10)
    result = run("compile", "conftest:make_encoder", "--calibration", data, "-o", output, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    assert ("converted to float32" in result.output) == (data not in ("user_data:images", "user_data:endless"))
    calibration = npu.Artifact.load(output).manifest["calibration"]
    assert calibration["samples"] + calibration["holdout_samples"] == (160 if data == "user_data:endless" else 40)


def test_a_mapping_is_divided_by_samples(user_code: Path) -> None:
    first, batches = calibration_batches("user_data:by_name")
    assert {name: list(tensor.shape) for name, tensor in first.items()} == {"images": [8, 3, 16, 16], "scale": [8]}
    assert len(list(batches)) == 5
    np.savez("whole.npz", images=make_images(10).numpy(), scale=np.ones(10))
    first, batches = calibration_batches("whole.npz")
    assert first["scale"].dtype == torch.float32
    assert [len(batch["images"]) for batch in batches] == [8, 2]


def test_inspect_names_what_is_wrong(artifact_copy: Path, tmp_path: Path) -> None:
    assert "There is no artifact" in run("inspect", tmp_path / "none.npu").output
    (artifact_copy / "model.onnx").write_bytes(b"")
    result = run("inspect", artifact_copy)
    assert result.exit_code == 1
    assert "is truncated" in result.output
