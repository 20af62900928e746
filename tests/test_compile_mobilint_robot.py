"""The kit of the robot example's whole encoder (L4), from the stage-1 weights in the repository, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from fake_compiler.board import ROOT, put_on, read_mxq
from mobilint_parts import plug_in

import lightning_npu as npu
from lightning_npu.cli import main
from lightning_npu.compile.mobilint_check import KNOWN_GOOD
from lightning_npu.errors import CompilerMissingError

TESTS = Path(__file__).resolve().parent
EXAMPLE = TESTS.parent / "examples" / "robot_policy"
SAMPLES = 100


def robot_frames(count: int) -> torch.Tensor:
    """Smooth pictures from a seeded generator, normalised as the example normalises its frames: (count, 3, 96, 96)."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=96, mode="bilinear") * 4 - 2


@pytest.fixture(scope="module")
def robot_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(EXAMPLE))
    try:
        from stage1 import load_encoder
    finally:
        sys.path.remove(str(EXAMPLE))
    output = tmp_path_factory.mktemp("robot") / "encoder_L4.npu"
    frames = robot_frames(SAMPLES + 20)
    with pytest.raises(CompilerMissingError):
        npu.compile_module(
            load_encoder(), (frames[:2],), calibration=frames.split(20), output=output, target="mobilint",
            calibration_samples=SAMPLES, holdout_samples=20, min_sqnr_db=None, source={"cut": "layers.3"},
        )  # fmt: skip
    return output.with_suffix(".kit")


def test_the_kit_of_the_robot_examples_l4_head(robot_kit: Path) -> None:
    content = json.loads((robot_kit / "kit.json").read_text())
    assert content["calibration"]["count"] == SAMPLES
    assert content["head"]["inputs"] == [{"name": "images", "layout": "HWC", "dtype": "float32", "shape": [96, 96, 3]}]
    assert [entry["shape"] for entry in content["head"]["outputs"]] == [[1, 36, 128]] * 8  # K1, V1, .., K4, V4
    assert content["model"]["attentions"] == 3  # the last layer hands out keys and values only
    assert max(content["model"]["max_abs_error"].values()) < 1e-4
    model = onnx.load(robot_kit / "model.onnx")
    assert {node.op_type for node in model.graph.node} <= KNOWN_GOOD
    assert sum(node.op_type == "Conv" for node in model.graph.node) == 21
    assert all(value.type.tensor_type.shape.dim[0].dim_value == 1 for value in model.graph.output)
    array = np.load(robot_kit / "calibration/0042.npy", allow_pickle=False)
    np.testing.assert_array_equal(array, robot_frames(SAMPLES + 20)[42].permute(1, 2, 0).numpy())
    assert "layers.3" in (robot_kit / "README.md").read_text()


def test_it_is_compiled_finished_and_used(robot_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(robot_kit / "compile.py"), "--output", str(robot_kit / "model.mxq")],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_mxq(robot_kit / "model.mxq")["samples"] == SAMPLES
    (tmp_path / "dev").mkdir()
    board = plug_in("fake", monkeypatch, tmp_path / "dev")
    put_on(board, robot_kit / "model.mxq")
    result = CliRunner().invoke(
        main, ["compile", "--finish", str(robot_kit / "model.mxq"), "-o", str(tmp_path / "encoder_L4.npu")]
    )
    assert result.exit_code == 0, result.output
    assert "model.mxq by qbcompiler 1.3.0 for aries-rb, core mode single, 8 bits throughout" in result.output
    assert "fidelity, through 'mobilint'" in result.output
    module = npu.NPUFrozenModule(tmp_path / "encoder_L4.npu", runtime="mobilint")
    features = module(robot_frames(3))
    assert [tuple(feature.shape) for feature in features] == [(3, 36, 128)] * 8
    module.close()
    board.released.set()


# ---- the command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def command(tmp_path: Path, *more: str) -> Result:
    return run(
        "compile", "user_data:build", "--calibration", "user_data:tensor", "--target", "mobilint", "--min-sqnr-db",
        "-50", "-o", tmp_path / "e.npu", *more,
    )  # fmt: skip


@pytest.fixture
def user_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_data.py").write_text(
        f"import sys; sys.path.append({str(TESTS)!r})\n"
        "from conftest import make_encoder as build, make_images\n"
        "def tensor(): return make_images(40)\n"
        "def frames(): return (make_images(40) * 255).byte()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_data", raising=False)


def test_the_command_writes_a_kit_says_how_to_go_on_and_ends_with_status_3(user_data: None, tmp_path: Path) -> None:
    result = command(tmp_path, "--core-mode", "global4", "--score-bits", "16")
    assert result.exit_code == 3, result.output
    assert not result.output.startswith("Error")
    assert f"was written to the compile kit {tmp_path / 'e.kit'}" in result.output
    assert "lightning-npu compile --finish" in result.output
    content = json.loads((tmp_path / "e.kit" / "kit.json").read_text())
    assert content["compile"]["core_mode"] == "global4"
    assert content["compile"]["score_bits"] == 16
    again = command(tmp_path)
    assert again.exit_code == 3
    assert "is there already and waits to be compiled" in again.output
    assert command(tmp_path, "--overwrite").exit_code == 3
    assert json.loads((tmp_path / "e.kit" / "kit.json").read_text())["compile"]["score_bits"] == 8


def test_the_command_takes_raw_frames(user_data: None, tmp_path: Path) -> None:
    result = run(
        "compile", "user_data:build", "--calibration", "user_data:frames", "--target", "mobilint", "--min-sqnr-db",
        "-50", "-o", tmp_path / "e.npu", "--mean", "0.4,0.5,0.6", "--std", "0.25,0.25,0.25",
    )  # fmt: skip
    assert result.exit_code == 3, result.output
    content = json.loads((tmp_path / "e.kit" / "kit.json").read_text())
    assert content["head"]["inputs"][0]["dtype"] == "uint8"
    assert content["compile"]["uint8"]["fused"] is True


def test_finishing_without_a_board(user_data: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_npu.runtimes.mobilint import library

    monkeypatch.setattr(library, "DEVICE_FOLDER", str(tmp_path))
    assert command(tmp_path).exit_code == 3
    script = tmp_path / "e.kit" / "compile.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], check=True, env=environment, capture_output=True)
    mxq = tmp_path / "e.kit" / "model.mxq"
    refused = run("compile", "--finish", mxq, "-o", tmp_path / "e.npu")
    assert refused.exit_code == 1
    assert "Error: Fidelity cannot be measured here" in refused.output
    done = run("compile", "--finish", mxq, "-o", tmp_path / "e.npu", "--no-fidelity")
    assert done.exit_code == 0, done.output
    assert "fidelity     not measured" in done.output
    shown: Any = json.loads(run("inspect", "--json", tmp_path / "e.npu").output)
    assert shown["fidelity"]["runtime"] == "unmeasured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compile", "-o", "x.npu"), "MODULE:NAME is missing"),
        (("compile", "a:b", "-o", "x.npu"), "--calibration is missing"),
        (("compile", "a:b", "--finish", "k/model.mxq", "-o", "x.npu"), "takes the head and its data from the kit"),
        (("compile", "a:b", "--calibration", "c:d", "-o", "x.npu", "--core-mode", "all"), "no such options"),
        (
            ("compile", "a:b", "--calibration", "c:d", "-o", "x.npu", "--target", "mobilint", "--mean", "a"),
            "--mean is no list of numbers",
        ),
    ],
)
def test_arguments_that_do_not_go_together(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_the_command_names_every_core_mode() -> None:
    from lightning_npu import cli
    from lightning_npu.compile.mobilint_options import CORE_MODES

    assert cli.CORE_MODES == CORE_MODES  # written twice, so that --help does not import torch
