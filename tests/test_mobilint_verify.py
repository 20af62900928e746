# ruff: noqa: F811  # pytest fixtures are imported by name
"""``make verify-mobilint``: without a board it says so; with one it finds what is wrong and reports the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from mobilint_parts import FAKES, artifact, board, fake_module, plug_in  # noqa: F401
from stubs import StubBoard

import lightning_npu as npu
from lightning_npu.runtimes.mobilint import library
from lightning_npu.verify_mobilint import checks, power
from lightning_npu.verify_mobilint.__main__ import main, verify
from lightning_npu.verify_mobilint.bench import Bench


@pytest.fixture
def mxq(tmp_path: Path) -> Path:
    path = tmp_path / "model.mxq"
    path.write_bytes(b".MXQ" + bytes(100))
    return path


@pytest.fixture
def bench(board: Any, mxq: Path) -> Bench:
    made = Bench(library.load(), mxq, 0, 0.05)
    made.find_mode()
    return made


@pytest.fixture
def children(mxq: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """A bench whose child processes have the fake as well, each with a board of its own."""
    plug_in("fake", monkeypatch, tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return Bench(library.load(), mxq, 0, 0.05, "single")


@pytest.mark.skipif(bool(library.device_nodes()), reason="there is a device")
def test_without_a_board_it_says_so_and_ends_with_2() -> None:
    command = [sys.executable, "-m", "lightning_npu.verify_mobilint"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "There is no Mobilint board to verify" in done.stderr
    assert "mobilint driver" in done.stderr


def test_a_good_board_passes_and_the_report_can_be_pasted(bench: Bench, board: Any, monkeypatch: Any) -> None:
    for name in ("two processes on one device", "the vendor's time limit", "QBRUNTIME_VISIBLE_DEVICES"):
        monkeypatch.setitem(checks.CHECKS, name, lambda bench: checks.Result("skipped", "a | b"))
    report, failed = verify(bench.path, 0, 0.05)
    assert not failed, report
    lines = report.splitlines()
    assert lines[0] == "## Mobilint board: verification report"
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| check")]
    assert len(rows) == len(checks.CHECKS) + 1
    assert any(line.startswith("| a thread per core | pass |") for line in rows)
    assert any(line.startswith("| power and utilisation | skipped |") for line in rows)
    assert "| two processes on one device | skipped | a \\| b |" in rows
    assert "not provoked" in report
    assert board.busy_cores == {0: set()}


def test_an_artifact_is_judged_too(bench: Bench, artifact: npu.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(checks.CHECKS):
        monkeypatch.setitem(checks.CHECKS, name, lambda bench: checks.Result("info", "left out"))
    report, failed = verify(artifact.path, 0, 0.05)
    assert not failed
    assert "| fidelity on this board | pass | output_0: cosine 1.00000" in report


def test_no_target_is_a_mistake_of_usage(board: Any) -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "Name an artifact for target 'mobilint' or an MXQ file" in result.output


def test_the_mode_of_a_bare_mxq_is_found_out(board: Any, mxq: Path) -> None:
    board.modes = ["Global4", "Global8"]  # the vendor's automatic choice refuses several
    bench = Bench(library.load(), mxq, 0, 0.05)
    assert bench.find_mode() == "global4"
    board.modes = ["Multi"]
    with pytest.raises(npu.ArtifactError, match="The MXQ is for core mode 'multi'"):
        Bench(library.load(), mxq, 0, 0.05).find_mode()


def test_wrong_answers_of_threads_are_found(bench: Bench, board: Any) -> None:
    assert checks.threads(bench).verdict == "pass"

    def fault(number: int) -> Any:
        return [np.full((1, 1, 3), 5, np.float32)] if board.running > 1 else None

    board.fault, board.latency_s = fault, 0.01
    found = checks.threads(bench)
    assert found.verdict == "FAIL"
    assert "16 threads" in found.text


def test_results_that_do_not_repeat_are_found(bench: Bench, board: Any) -> None:
    board.fault = lambda number: [np.full((1, 1, 3), number, np.float32)]
    assert checks.repeats(bench).verdict == "FAIL"
    board.fault = lambda number: [np.full((1, 1, 3), np.nan, np.float32)]
    assert "finite: False" in checks.repeats(bench).text


def test_asynchronous_garbage_is_found(bench: Bench, board: Any) -> None:
    board.latency_s = 0.003  # else none is in flight beside another
    assert checks.asynchronous(bench).verdict == "pass"
    board.garbage = "garbage"
    found = checks.asynchronous(bench)
    assert found.verdict == "FAIL"
    assert "wrong" in found.text


def test_a_held_gil_is_found(bench: Bench, board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    board.latency_s = 0.05
    assert checks.gil(bench).verdict == "pass"
    board.latency_s = 0.0
    board.fault = lambda number: sum(range(10_000_000)) * 0 or None  # one C call that keeps the GIL
    found = checks.gil(bench)
    assert found.verdict == "FAIL", found.text
    monkeypatch.setattr(checks, "_TELLING_S", 1e9)
    assert "too short to tell" in checks.gil(bench).text


def test_batched_calls_are_compared(bench: Bench, board: Any) -> None:
    found = checks.batched(bench)
    assert found.verdict == "info"
    assert "equal: True" in found.text
    calls = board.calls
    board.fault = lambda number: [np.zeros((4, 1, 1, 3), np.float32)] if number == calls + 8 else None
    found = checks.batched(bench)
    assert found.verdict == "FAIL"
    assert "equal: False" in found.text


def test_int8_is_tried(bench: Bench, board: Any) -> None:
    assert "int8 in is refused: Model_InvalidNPUDtype" in checks.int8(bench).text
    board.output_type = "Int8"
    board.compute = lambda arrays: [np.zeros((1, 1, 3), np.int8)]
    assert "int8 in gives [((1, 1, 3), 'int8')]" in checks.int8(bench).text


def test_processes_share_a_board(children: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_START_S", 1.0)
    found = checks.isolation(children)
    assert found.verdict == "pass", found.text
    assert "two halves at once" in found.text
    children.mode = "global8"
    assert checks.isolation(children).verdict == "skipped"


def test_what_children_say_of_limits_and_visibility(children: Bench) -> None:
    assert "usable afterwards: True" in checks.time_limit(children).text
    assert "with QBRUNTIME_VISIBLE_DEVICES=0: [0]" in checks.visible_devices(children).text
    children.path = children.path.with_name("gone.mxq")
    assert "half of the cores alone: " in checks.isolation(children).text


def test_a_second_model_is_shared_or_refused(bench: Bench, board: Any) -> None:
    assert checks.overlapping_models(bench).text == "allowed; equal results: True"
    board.relocatable = False
    assert "refused: Acc_CoreAlreadyInUse" in checks.overlapping_models(bench).text


def test_power_and_utilisation(bench: Bench, stub_mbltml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mbltml([StubBoard()])
    monkeypatch.setattr(power, "_LEAST_S", 1.0)
    monkeypatch.setattr(power, "_SETTLE_S", 0.0)
    found = power.sensors(bench)
    assert found.verdict == "info", found.text
    assert "idle" in found.text
    assert "utilisation idle" in found.text


def test_a_check_that_breaks_does_not_hide_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> checks.Result:
        raise fake_module()._core.fail("Acc_NPUTimeout", "injected")

    for name in list(checks.CHECKS):
        monkeypatch.setitem(checks.CHECKS, name, lambda bench: checks.Result("info", "left out"))
    monkeypatch.setitem(checks.CHECKS, "one thread", broken)
    report, failed = verify(bench.path, 0, 0.05)
    assert failed
    assert "| one thread | FAIL | QbRuntimeError: Acc_NPUTimeout occurred." in report
    assert report.count("left out") == len(checks.CHECKS) - 1
