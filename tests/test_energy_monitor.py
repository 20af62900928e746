"""EnergyMonitor against truth: windows, sources that fail, fork, copies, baselines, memory."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_boards import WAVE, FolderSource, wait_until

from lightning_npu.errors import InputError
from lightning_npu.power import session as sessions
from lightning_npu.power.base import Board, BoardEnergy, PowerSource, Reading
from lightning_npu.power.calibration import Calibration
from lightning_npu.power.curve import BoardCurve
from lightning_npu.power.monitor import EnergyMonitor, Window
from lightning_npu.power.polling import Poller, back_off_s, read
from lightning_npu.power.sampling import THREAD_NAME, Feed
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource, SquareWave

GPU = SquareWave(50.0, 180.0, period_s=0.4)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    wait_until(lambda: not threads(), "the end of all threads that read")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FolderSource]:
    yield FolderSource(str(tmp_path), boards=2)
    (tmp_path / "hang").unlink(missing_ok=True)


def pair(**options: Any) -> SimulatedSource:
    """A board with a counter and one without."""
    boards = [
        SimulatedBoard(GPU, name="a", kind="gpu", counter=True, **options),
        SimulatedBoard(WAVE, name="b", kind="npu"),
    ]
    return SimulatedSource(boards)


def truth(window: Window, wave: SquareWave = WAVE) -> float:
    assert window.ended_s is not None
    return wave.energy_j(window.started_s, window.ended_s)


def check(window: Window, *waves: SquareWave) -> None:
    """The truth of all boards lies within the stated uncertainty."""
    assert window.energy_j is not None
    assert window.uncertainty_j is not None
    assert abs(window.energy_j - sum(truth(window, wave) for wave in waves)) <= window.uncertainty_j


# windows


def test_windows_nest_overlap_and_cross_threads() -> None:
    with EnergyMonitor([pair()], process=False) as monitor:
        windows = []
        with monitor.window("outer") as outer:
            first = monitor.begin("first")
            with monitor.window("inner") as inner:
                time.sleep(0.3)  # the work
            second = monitor.begin("second")
            time.sleep(0.3)  # more of it
            other = threading.Thread(target=first.end)
            other.start()
            other.join()
            time.sleep(0.2)  # and more
            second.end()
        windows = [outer, inner, first, second]
        assert all(window.settle() for window in windows)
        assert outer.name == "outer"
        assert outer.coverage == pytest.approx(1.0)
        assert set(outer.by_kind) == {"gpu", "npu"}
        assert outer.by_board.keys() == {board.key for board in monitor.boards}
        assert outer.mean_power_w == pytest.approx(outer.energy_j / outer.duration_s)
        assert sum(energy.energy_j for energy in outer.by_kind.values()) == pytest.approx(outer.energy_j)
    for window in windows:
        check(window, GPU, WAVE)


def test_parts_add_up_to_the_whole() -> None:
    """Also when moments of one window are the edges of the others: each is a difference on the same curve."""
    with EnergyMonitor([pair()], process=False) as monitor:
        whole = monitor.begin()
        parts = []
        for _ in range(5):
            with monitor.window() as part:
                time.sleep(0.06)  # a step
            parts.append(part)
        whole.end()
        for part in (whole, *parts):
            part.settle()
    between_s = whole.duration_s - sum(part.duration_s for part in parts)
    rest_j = whole.energy_j - sum(part.energy_j for part in parts)
    assert -1e-6 <= rest_j <= between_s * (GPU.high_w + WAVE.high_w) + 1e-6


def test_an_open_window_tells_of_the_time_so_far() -> None:
    with EnergyMonitor([pair()], process=False) as monitor:
        window = monitor.window()
        assert window.duration_s == 0.0
        assert window.energy_j is None
        assert math.isnan(window.started_s)
        with window:
            wait_until(lambda: (window.energy_j or 0.0) > 5.0, "some joules")
            assert not window.settled
            assert not window.settle(10.0)  # does not wait for a window that is open
            assert window.ended_s is None
            before = window.total
        after = window.total
        # what was extrapolated then may be less now, within what both say of themselves
        assert after.energy_j >= before.energy_j - before.uncertainty_j - after.uncertainty_j
        ended_s = window.ended_s
        assert window.end().ended_s == ended_s
        assert window.begin().ended_s == ended_s


def test_stop_ends_open_windows_and_makes_figures_final() -> None:
    monitor = EnergyMonitor([pair()], process=False)
    monitor.start()
    window = monitor.begin()
    time.sleep(0.2)  # the work
    monitor.stop()
    assert window.settled
    check(window, GPU, WAVE)
    assert window.by_board == window.by_board
    duration_s = window.duration_s
    window.end()
    assert window.duration_s == duration_s


def test_start_and_stop_may_be_repeated() -> None:
    monitor = EnergyMonitor([pair()], process=False)
    monitor.stop()
    assert monitor.boards == ()
    assert monitor.health() == {}
    assert monitor.trace() == {}
    assert monitor.power_w() == {}
    assert monitor.started_s is None
    energies = []
    for _ in range(2):
        monitor.start()
        monitor.start()
        assert len(threads()) == 1
        with monitor.window() as window:
            time.sleep(0.1)  # the work
        monitor.stop()
        monitor.stop()
        assert not threads()
        assert window.settled
        check(window, GPU, WAVE)
        energies.append((window, window.energy_j))
    assert all(window.energy_j == energy_j for window, energy_j in energies)
    assert set(monitor.power_w().values()) == {None}
    assert all(len(points) > 1 for points in monitor.trace().values())


def test_two_monitors_measure_side_by_side() -> None:
    with EnergyMonitor([pair()], process=False) as one, EnergyMonitor([pair()], 0.03, process=False) as other:
        with one.window() as first, other.window() as second:
            time.sleep(0.3)  # the work
        first.settle()
        second.settle()
    check(first, GPU, WAVE)
    check(second, GPU, WAVE)


def test_a_monitor_that_nobody_holds_stops_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_npu.power.sampling.UPKEEP_S", 0.05)
    monitor = EnergyMonitor([pair()], process=False)
    monitor.start()
    window = monitor.begin()
    del monitor
    time.sleep(0.2)  # longer than the upkeep's interval
    assert threads()  # the open window needs the readings
    window.end()
    wait_until(lambda: not threads(), "the end of the thread")
    assert window.settled


def test_health_power_and_trace_are_primitives() -> None:
    import json

    with EnergyMonitor([pair()], process=False) as monitor:
        wait_until(lambda: all(h["readings"] > 5 for h in monitor.health().values()), "readings")
        power_w, trace, health = monitor.power_w(), monitor.trace(4), monitor.health()
        assert monitor.started_s <= time.monotonic()
        assert monitor.started_at <= time.time()
    assert json.loads(json.dumps([power_w, health])) == [power_w, health]
    assert set(power_w.values()) <= {50.0, 180.0, 8.0, 25.0}
    assert {entry["state"] for entry in health.values()} == {"ok"}
    assert {entry["kind"] for entry in health.values()} == {"gpu", "npu"}
    assert all(entry["simulated"] and entry["coverage"] > 0.9 for entry in health.values())
    assert all(1 <= len(points) <= 4 for points in trace.values())


# nothing there


def test_without_any_source_there_is_one_warning_and_no_zero(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    source = FolderSource(str(tmp_path))
    source.set("absent")
    with EnergyMonitor([source]) as monitor, monitor.window() as window:
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No board's power can be read" in caplog.text
    assert "remove the file 'absent'" in caplog.text
    assert "remove the file 'absent'" in monitor.problems["folder"]
    assert window.energy_j is None
    assert window.uncertainty_j is None
    assert window.net_energy_j is None
    assert window.mean_power_w is None
    assert window.total is None
    assert window.coverage == 0.0
    assert window.by_board == {}
    assert window.by_kind == {}
    assert window.duration_s > 0
    assert window.settle(5.0)


def test_a_source_that_is_missing_is_named_and_the_others_measured(
    source: FolderSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = FolderSource(str(tmp_path / "no"))
    (tmp_path / "no").mkdir()
    absent.set("absent")
    with EnergyMonitor([source, absent]) as monitor:
        assert len(monitor.boards) == 2
    assert list(monitor.problems) == ["folder #2"]
    assert len(caplog.records) == 1
    assert "folder #2: The folder has no boards: remove the file 'absent'" in caplog.text


def test_a_board_counts_once_though_two_sources_see_it(source: FolderSource, tmp_path: Path) -> None:
    with EnergyMonitor([source, FolderSource(str(tmp_path), boards=1)]) as monitor:
        assert len(monitor.boards) == 2
        assert "read through another source already" in monitor.problems["folder #2"]


def test_a_window_of_a_monitor_that_does_not_run_knows_nothing() -> None:
    with EnergyMonitor([pair()]).window() as window:
        pass
    assert window.energy_j is None
    assert window.duration_s >= 0
    assert not window.settled or window.by_board == {}


def test_auto_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    with EnergyMonitor() as monitor, monitor.window() as window:
        pass
    assert bool(monitor.boards) == (window.energy_j is not None)
    if not monitor.boards:
        assert len(caplog.records) == 1


# sources that fail


def test_a_source_that_raises_costs_a_gap_and_two_lines(source: FolderSource, caplog: pytest.LogCaptureFixture) -> None:
    key = source.key
    with caplog.at_level(logging.INFO, "lightning_npu.power"), EnergyMonitor([source], 0.01) as monitor:
        with monitor.window() as window:
            # a whole period: who bridges a gap can only allow for powers that were seen
            wait_until(lambda: monitor.health()[key]["readings"] > 80, "readings")
            source.set("raise")
            wait_until(lambda: monitor.health()[key]["problem"], "a problem")
            assert monitor.health()[key]["problem"] == "RuntimeError: the driver has had enough"
            wait_until(lambda: monitor.health()[key]["failed"] >= 6, "attempts")  # the gap is longer than a second
            count = monitor.health()[key]["readings"]
            source.set("raise", False)
            wait_until(lambda: monitor.health()[key]["readings"] > count + 20, "recovery")
        window.settle()
        assert 0 < window.coverage < 1
        check(window, WAVE, WAVE)
    lines = [message for message in caplog.messages if message.startswith(f"Power of {key} ")]
    assert len(lines) == 2, lines  # one per change of state
    assert lines[0].endswith("lost: RuntimeError: the driver has had enough")
    assert lines[1].endswith("ok")


class Wrong(PowerSource):
    """A third party's source with a mistake in it, which shows after some readings."""

    name = "wrong"

    def __init__(self, given: Any) -> None:
        self.given, self.calls = given, itertools.count()

    @classmethod
    def available(cls) -> str:
        return "ok"

    def boards(self) -> tuple[Board, ...]:
        return (Board("here/wrong", "npu", "a board", counter=True),)

    def read(self, board: Board, *, power: bool = True) -> Reading:
        now_s = time.monotonic()
        return Reading(now_s, 50.0, 50.0 * now_s) if next(self.calls) < 9 else self.given


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (None, "the source gave None, which is no Reading"),
        ((1.0, 2.0), "which is no Reading"),
        (Reading(None, 50.0), "TypeError"),  # type: ignore[arg-type]
        (Reading(0.0, "n/a"), "could not convert string to float: 'n/a'"),  # type: ignore[arg-type]
        (Reading(0.0, None, [7]), "TypeError"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_reading_is_a_problem_and_no_error(given: Any, problem: str) -> None:
    with EnergyMonitor([Wrong(given), pair()], 0.005) as monitor:
        wait_until(lambda: monitor.health()["here/wrong"]["failed"] > 2, "wrong readings")
        with monitor.window() as window:
            wait_until(lambda: window.duration_s > 0.05, "some work")
        health = monitor.health()["here/wrong"]
        assert problem in health["problem"]
        assert health["readings"] >= 1
        assert len(window.by_board) >= 2


def test_a_source_that_wants_to_end_the_process_does_not() -> None:
    def leave(board: Board, *, power: bool = True) -> Reading:
        raise SystemExit(70)

    source = Wrong(None)
    source.read = leave  # type: ignore[method-assign]
    with EnergyMonitor([source, pair()]) as monitor, monitor.window() as window:
        wait_until(lambda: monitor.health()["here/wrong"]["failed"] > 0, "a refusal")
    assert window.missing == {"here/wrong": "SystemExit: 70"}


def test_numbers_of_numpy_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    source = Wrong(None)
    board = source.boards()[0]
    source.read = lambda board, power=True: Reading(np.float64(1.0), np.float32(2.5), np.int64(3))  # type: ignore
    reading = read(source, board)
    assert (reading.time_s, reading.power_w, reading.energy_j, reading.problem) == (1.0, 2.5, 3.0, "")
    assert all(type(value) is float for value in (reading.time_s, reading.power_w, reading.energy_j))


@pytest.mark.parametrize(
    ("boards", "problem"),
    [
        (None, "TypeError: 'NoneType' object is not iterable"),
        (("gpu0",), "the source named 'gpu0', which is no Board"),
        ((Board("here/wrong", "npu", "a board", limit_w="300"),), "has numbers that are none"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_board_is_a_problem_and_no_error(boards: Any, problem: str) -> None:
    source = Wrong(None)
    source.boards = lambda: boards  # type: ignore[method-assign]
    with EnergyMonitor([source, pair()]) as monitor:
        assert problem in monitor.problems["wrong"]
        assert len(monitor.boards) == 2


def test_a_recipe_that_fails_costs_the_helper_process_alone() -> None:
    def recipe() -> None:
        raise RuntimeError("no recipe today")

    source = SimulatedSource([SimulatedBoard(WAVE)])
    source.recipe = recipe  # type: ignore[method-assign, assignment]
    with EnergyMonitor([source], 0.01) as monitor, monitor.window() as window:
        wait_until(lambda: (window.energy_j or 0.0) > 0, "energy")
        assert next(iter(monitor.health().values()))["reader"] == "thread"


def test_a_board_that_is_lost_leaves_the_other(source: FolderSource) -> None:
    kept, lost = (board.key for board in source.boards())
    with EnergyMonitor([source], 0.01) as monitor:
        wait_until(lambda: monitor.health()[lost]["readings"] > 20, "readings")
        source.set("lost-1")
        wait_until(lambda: monitor.health()[lost]["state"].startswith("lost"), "the loss is seen")
        assert monitor.power_w()[lost] is None
        assert monitor.power_w()[kept] is not None
        with monitor.window() as window:
            time.sleep(0.2)  # the work
        window.settle(0.2)
        assert abs(window.by_board[kept].energy_j - truth(window)) <= window.by_board[kept].uncertainty_j
        assert window.coverage < 0.01
        assert lost in window.missing or window.by_board[lost].state.startswith("lost")
        assert monitor.health()[kept]["state"] == "ok"


def test_a_board_that_never_read_is_missing_and_not_zero(source: FolderSource) -> None:
    source.set("lost-1")
    with EnergyMonitor([source], 0.01) as monitor:
        with monitor.window() as window:
            time.sleep(0.1)  # the work
        assert window.settle()
        kept, lost = (board.key for board in source.boards())
        assert set(window.by_board) == {kept}
        assert window.missing == {lost: "the board fell off the bus"}
        assert window.coverage == 0.0
        assert "the board fell off the bus" in monitor.health()[lost]["state"]
    check(window, WAVE)


def test_a_driver_call_that_hangs_stalls_nobody_else(
    source: FolderSource, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "STOP_S", 0.2)
    monkeypatch.setattr(sessions, "STALE_S", 0.3)
    other = pair()
    with EnergyMonitor([source, other], 0.01, process=False) as monitor:
        source.set("hang")
        with monitor.window() as window:
            wait_until(lambda: monitor.health()[source.key]["state"].startswith("lost"), "silence is noticed")
        assert "nothing has come" in monitor.health()[source.key]["state"]
        wait_until(
            lambda: {b.key for b in other.boards()} <= {k for k, e in window.by_board.items() if e.settled}, "rest"
        )
        energies = window.by_board
    assert "hangs; its thread is left to itself" in caplog.text
    for board, wave in zip(other.boards(), (GPU, WAVE), strict=True):
        energy = energies[board.key]
        assert abs(energy.energy_j - truth(window, wave)) <= energy.uncertainty_j
    assert window.settled  # nothing is waited for after stop
    source.set("hang", False)


def test_a_slow_source_is_read_at_its_own_pace_and_not_at_edges(tmp_path: Path) -> None:
    slow = FolderSource(str(tmp_path), counter=True)
    slow.set("slow")
    with EnergyMonitor([slow], 0.01) as monitor:
        wait_until(lambda: monitor.health()[slow.key]["readings"] > 5, "readings")
        (reader,) = monitor._session._readers
        count = monitor._session.feeds[0].readings
        windows = [monitor.begin().end() for _ in range(50)]
        assert monitor._session.feeds[0].readings - count < 50  # 100 edges were not waited for
        with monitor.window() as window:
            time.sleep(0.5)  # the work
        assert window.settle()
        assert reader._poller.call_s > 0.05
    check(window, WAVE)
    assert all(window.settled for window in windows)


def test_counters_are_read_at_the_edges(tmp_path: Path) -> None:
    """With polls 10 s apart all that is known of a short window is what its edges read."""
    source = FolderSource(str(tmp_path), counter=True)
    with EnergyMonitor([source], 10.0) as monitor:
        count = monitor.health()[source.key]["readings"]
        with monitor.window() as window:
            time.sleep(0.3)  # the work
        assert monitor.health()[source.key]["readings"] == count + 2
    check(window, WAVE)
    assert window.energy_j == pytest.approx(truth(window), rel=0.01)


def test_a_system_without_threads_costs_the_measurement_alone(
    source: FolderSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with EnergyMonitor([source]) as monitor, monitor.window() as window:
        pass
    assert window.energy_j is None
    assert "is not read: can't start new thread" in caplog.text


@given(st.integers(0, 1000))
def test_back_off_doubles_up_to_half_a_minute(failures: int) -> None:
    assert back_off_s(failures) <= back_off_s(failures + 1) <= 30.0
    assert [back_off_s(n) for n in range(12)] == [0, 0, 0, 0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("kind", "counter", "jitter"), [("gpu", True, 25), ("gpu", False, 50), ("npu", False, 25), ("cpu", True, 25)]
)
def test_rounds_jitter_by_a_quarter_or_by_half(tmp_path: Path, kind: str, counter: bool, jitter: float) -> None:
    boards = (Board("h/0", "npu", "x"), Board("h/1", kind, "x", counter=counter))
    poller = Poller(FolderSource(str(tmp_path)), boards, 100.0, lambda index, reading: None)
    moments = [poller.round() for _ in range(4000)]
    steps = [after - before for before, after in itertools.pairwise(moments)]
    assert min(steps) >= 100.0 - jitter
    assert max(steps) <= 100.0 + jitter
    assert max(steps) - min(steps) > 1.8 * jitter
    assert sum(steps) / len(steps) == pytest.approx(100.0, rel=0.03)


def test_a_failing_board_is_left_alone_and_the_other_is_not(source: FolderSource) -> None:
    source.set("lost-1")
    counts = [0, 0]

    def count(index: int, reading: Reading) -> None:
        counts[index] += 1

    poller = Poller(source, source.boards(), 1e-4, count)
    for _ in range(50):
        poller.round()
    assert counts[0] == 50
    assert counts[1] <= 4
    poller.round(everything=True)
    assert counts[0] == 51


# what users know


def test_net_is_gross_less_idle_and_never_clipped() -> None:
    gpu, npu = pair().boards()
    idle = {"gpu": 1000.0, npu.key.partition("/")[2]: 5.0}
    with EnergyMonitor([pair()], process=False, idle_power_w=idle) as monitor:
        with monitor.window() as window:
            time.sleep(0.1)  # the work
        window.settle()
        assert monitor.idle_power_w[gpu.key] == {
            "power_w": 1000.0,
            "spread_w": None,
            "seconds": None,
            "source": "given",
            "cuda_context": None,
        }
    assert window.net_energy_j == pytest.approx(window.energy_j - 1005.0 * window.duration_s)
    assert window.net_energy_j < 0


def test_no_net_while_one_idle_power_is_unknown() -> None:
    with EnergyMonitor([pair()], process=False, idle_power_w={"gpu": 50.0}) as monitor, monitor.window() as window:
        time.sleep(0.1)  # the work
    assert window.energy_j is not None
    assert window.net_energy_j is None


def test_idle_power_is_measured() -> None:
    monitor = EnergyMonitor([pair()], process=False)
    assert monitor.measure_idle() is None  # says so and goes on
    with monitor:
        assert monitor.idle_power_w is None
        idle = monitor.measure_idle(seconds=0.8, discard_s=0.1)
        assert idle == monitor.idle_power_w
        with monitor.window() as window:
            time.sleep(0.1)  # the work
        window.settle()
    gpu, npu = monitor.boards
    assert idle[gpu.key]["power_w"] == pytest.approx(115.0, rel=0.2)
    assert idle[npu.key]["power_w"] == pytest.approx(16.5, rel=0.3)
    assert idle[gpu.key]["source"] == "measured"
    assert idle[gpu.key]["spread_w"] > 0
    assert idle[gpu.key]["seconds"] >= 0.8
    assert idle[gpu.key]["cuda_context"] is False
    assert window.net_energy_j is not None


def test_calibration_corrects_what_the_sensor_says() -> None:
    gpu, npu = pair().boards()
    calibration = {
        gpu.key: {"gain": 1.1, "gain_uncertainty": 0.01},
        "npu": {"gain": 0.5, "offset_w": 2.0, "gain_uncertainty": 0.0},
    }
    with EnergyMonitor([pair()], process=False, calibration=calibration) as monitor:
        with monitor.window() as window:
            time.sleep(0.3)  # the work
        window.settle()
        assert monitor.power_w()[npu.key] in (0.5 * 8 + 2, 0.5 * 25 + 2)
        assert all(6.0 <= watts <= 14.5 for _, watts in monitor.trace()[npu.key])
    energy = window.by_board[gpu.key]
    assert energy.gain_j == pytest.approx(0.01 * energy.energy_j)
    assert abs(energy.energy_j - 1.1 * truth(window, GPU)) <= energy.uncertainty_j
    energy = window.by_board[npu.key]
    assert energy.gain_j == 0
    assert abs(energy.energy_j - (0.5 * truth(window) + 2.0 * window.duration_s)) <= energy.uncertainty_j


@given(st.floats(0.5, 2.0), st.floats(-5, 5), st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0.01, 1e4))
def test_a_correction_is_linear(gain: float, offset_w: float, energy_j: float, part_j: float, seconds: float) -> None:
    measured = BoardEnergy(energy_j, 3 * part_j, part_j, part_j, part_j, 1.0, seconds, 10.0, "power", "ok", True)
    corrected = Calibration(gain, 0.0, offset_w).energy(measured)
    assert corrected.energy_j == pytest.approx(gain * energy_j + offset_w * seconds)
    assert corrected.uncertainty_j == pytest.approx(gain * 3 * part_j)
    assert corrected.max_power_w == pytest.approx(gain * 10.0 + offset_w)


def test_names_that_no_board_goes_by_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with EnergyMonitor([pair()], process=False, calibration={"GPU-1": {"gain": 1.0}}, idle_power_w={"tpu": 1.0}):
        pass
    assert "calibration names GPU-1, which is none of the boards: " in caplog.text
    assert "idle_power_w names tpu, which is none of the boards: " in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": "nvml"}, r"write sources=\['nvml'\]"),
        ({"sources": 3}, "put them into a list"),
        ({"sources": ["no_such"]}, "There is no power source named 'no_such'"),
        ({"sources": [FolderSource]}, "the class alone is not enough"),
        ({"interval_s": 0.0}, "interval_s from 0.001 to 60.0 seconds"),
        ({"interval_s": "fast"}, "interval_s is not a number"),
        ({"interval_s": math.nan}, "interval_s is not a number"),
        ({"process": "maybe"}, '"auto", True or False'),
        ({"idle_power_w": 5.0}, "watts by board or kind"),
        ({"idle_power_w": {"gpu": -1.0}}, "below zero"),
        ({"idle_power_w": {"gpu": None}}, "The idle power of 'gpu' is not a number"),
        ({"calibration": [1.02]}, "calibration is no mapping"),
        ({"calibration": {"gpu": 1.02}}, "The calibration of 'gpu' cannot be read"),
        ({"calibration": {"gpu": {"factor": 1.02}}}, "gain, gain_uncertainty, offset_w"),
        ({"calibration": {"gpu": {"gain": -1.0}}}, "gain is the factor"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EnergyMonitor(**arguments)


# processes and copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda monitor: pickle.loads(pickle.dumps(monitor))])
def test_a_copy_is_stopped_and_works(source: FolderSource, copied: Any) -> None:
    with EnergyMonitor([source], idle_power_w={"npu": 3.0}) as monitor:
        twin = copied(monitor)
        assert not twin.running
        assert twin.boards == ()
        with twin, twin.window() as window:
            time.sleep(0.1)  # the work
        assert monitor.running
    check(window, WAVE, WAVE)
    assert window.net_energy_j is not None


FORK = """
import os, sys, threading, time
sys.path.insert(0, {tests!r})
from power_boards import WAVE, FolderSource
from lightning_npu.power import EnergyMonitor
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource
monitor = EnergyMonitor([FolderSource({folder!r}, remote=True), SimulatedSource([SimulatedBoard(WAVE, counter=True)])])
monitor.start()
window = monitor.begin()
child = os.fork()
if child == 0:
    assert not monitor.running and monitor.boards == () and monitor.health() == {{}}
    assert window.end().energy_j is None and not window.settle(1.0)
    monitor.stop()
    monitor.start()
    with monitor.window() as own:
        time.sleep(0.3)
    monitor.stop()
    assert abs(own.energy_j - 2 * WAVE.energy_j(own.started_s, own.ended_s)) <= own.uncertainty_j, own.by_board
    assert threading.active_count() == 1
    sys.exit(7)  # through atexit, as in a child that lives on
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert {{h["reader"] for h in monitor.health().values()}} == {{"process", "thread"}}
monitor.stop()
assert window.coverage > 0.9, window.by_board
assert abs(window.energy_j - 2 * WAVE.energy_j(window.started_s, window.ended_s)) <= window.uncertainty_j
print("parent done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_parent_alone_and_can_measure(tmp_path: Path) -> None:
    code = FORK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "parent done\n"


def test_a_script_that_forgets_to_stop_ends_in_order(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from power_boards import FolderSource\n"
        "from lightning_npu.power import EnergyMonitor\n"
        f"monitor = EnergyMonitor([FolderSource({str(tmp_path)!r})])\n"
        "monitor.start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert (tmp_path / "closed").exists()


# memory


def test_a_long_window_stays_right_while_detail_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_npu.power.sampling.UPKEEP_S", 0.05)
    monkeypatch.setattr(sessions, "KEEP_S", 0.1)
    with EnergyMonitor([pair()], 0.002, process=False) as monitor:
        outer = monitor.begin()
        time.sleep(0.3)  # the work
        inner = monitor.begin()
        time.sleep(0.5)  # the work
        inner.end()
        time.sleep(0.5)  # the work; the inner window's edges are past the horizon
        check(inner, GPU, WAVE)
        outer.end()
        outer.settle()
    check(outer, GPU, WAVE)
    assert inner.energy_j == pytest.approx(truth(inner, GPU) + truth(inner), rel=0.02)


def test_memory_does_not_grow_with_time() -> None:
    board = Board("host/x", "npu", "a board")
    feed = Feed(board, BoardCurve(board, poll_s=0.05), Calibration())

    def minutes(first: int, last: int) -> int:
        for minute in range(first, last):
            feed.add(Reading(n / 20, WAVE.power_w(n / 20)) for n in range(minute * 1200, (minute + 1) * 1200))
            feed.forget((minute - 1) * 60, [10.0])
        return tracemalloc.get_traced_memory()[0]

    minutes(0, 4)
    tracemalloc.start()
    try:
        grown = -minutes(4, 8) + minutes(8, 16)
    finally:
        tracemalloc.stop()
    assert grown < 200_000  # bytes, for 9600 readings, which would take a million
    energy = feed.energy(10.0, 950.0)
    assert energy is not None
    assert energy.energy_j == pytest.approx(WAVE.energy_j(10.0, 950.0), rel=0.001)


def test_a_source_is_a_power_source(source: PowerSource) -> None:
    assert len(source.boards()) == 2
