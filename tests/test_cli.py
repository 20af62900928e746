"""The command says what the machine can do, compiles, and reads artifacts back; errors are text, not tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import make_images

import lightning_npu as npu
from lightning_npu.cli import main
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
    assert {"machine", "runtime", "package"} <= {finding["kind"] for finding in findings}
    assert all(finding["text"] for finding in findings)
    assert len(findings) == len(examine())


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
    assert json.loads(run("inspect", output, "--json").output) == npu.Artifact.load(output).manifest


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


@pytest.mark.usefixtures("in_tests")
@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        ("conftest:make_encoder", "conftest:no_such_name", "cannot be imported"),
        ("conftest:no_such_name", "test_cli:calibration", "cannot be imported"),
        ("conftest", "test_cli:calibration", "Expected: MODULE:NAME"),
        ("test_cli:calibration", "test_cli:calibration", "gives no nn.Module"),
        ("conftest:make_encoder", "no_such_file.npy", "cannot be read"),
    ],
)
def test_compile_errors_are_text(tmp_path: Path, module: str, data: str, message: str) -> None:
    result = run("compile", module, "--calibration", data, "-o", tmp_path / "x.npu")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_pickled_calibration_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)
    np.save(tmp_path / "data.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    result = run("compile", "conftest:make_encoder", "--calibration", tmp_path / "data.npy", "-o", tmp_path / "x.npu")
    assert result.exit_code == 1
    assert "cannot be read" in result.output


def test_inspect_names_what_is_wrong(artifact_copy: Path, tmp_path: Path) -> None:
    assert "There is no artifact" in run("inspect", tmp_path / "none.npu").output
    (artifact_copy / "model.onnx").write_bytes(b"")
    result = run("inspect", artifact_copy)
    assert result.exit_code == 1
    assert "is truncated" in result.output
