"""Trace files, replayed traces, and boards whose power is stated."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_npu.errors import InputError, PowerUnavailableError
from lightning_npu.power import ReplaySource, SimulatedSource
from lightning_npu.power import replay as replay_module
from lightning_npu.power import simulated as simulated_module
from lightning_npu.power.host import host_id
from lightning_npu.power.simulated import SimulatedBoard, SquareWave
from lightning_npu.power.trace_file import Trace, TraceRow, read_trace, write_trace
from lightning_npu.runtimes.simulated import SimulatedRuntime

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
ROWS = (
    TraceRow(10.0, "n/GPU-1", "gpu", 100.0, 5000.0),
    TraceRow(10.0, "n/npu", "npu", 15.0),
    TraceRow(11.0, "n/GPU-1", "gpu", None, 5110.0),
    TraceRow(12.0, "n/GPU-1", "gpu", 120.0, None),
    TraceRow(12.0, "n/npu", "npu", 0.0),
    TraceRow(14.0, "n/GPU-1", "gpu", 90.0, 5320.0),
)


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now


@given(st.lists(st.tuples(numbers, st.text(), st.none() | numbers, st.none() | numbers), min_size=1))
def test_what_is_written_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, readings: list[tuple[float, str, float | None, float | None]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    texts = [(t, "".join(c for c in board if c.isprintable()), *rest) for t, board, *rest in readings]
    rows = tuple(TraceRow(t, board, "gpu", *rest) for t, board, *rest in sorted(texts, key=lambda row: row[0]))
    write_trace(path, rows)
    assert read_trace(path).rows == rows


def test_an_interrupted_writer_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    write_trace(path, ROWS)

    def broken() -> object:
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(path, broken())
    assert read_trace(path).rows == ROWS
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", r"is no power trace(.|\n)*t_s,board,kind,power_w,energy_j(.|\n)*nothing"),
        ("time,watts\n", r"is no power trace(.|\n)*Got: time,watts"),
        ("t_s,board,kind,power_w,energy_j\n", "trace is empty"),
        ("t_s,board,kind,power_w,energy_j\n0,a,gpu,1,2\n0,a,gpu,x,2\n", r"Line 3 of(.|\n)*Got: 0,a,gpu,x,2"),
        ("t_s,board,kind,power_w,energy_j\n0,a,gpu,1\n", r"Line 2 of(.|\n)*Got: 0,a,gpu,1"),
        ("t_s,board,kind,power_w,energy_j\n0,a,gpu,nan,2\n", r"Reading 1 of(.|\n)*finite"),
        ("t_s,board,kind,power_w,energy_j\n1,a,gpu,1,2\n0,a,gpu,1,2\n", "Reading 2 of .* before the one above"),
        ("t_s,board,kind,power_w,energy_j\n1,a,gpu,1,2\n1,a,npu,1,2\n", "Reading 2 of .* another kind"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)
    with pytest.raises(PowerUnavailableError, match=message):
        ReplaySource(path).boards()


def test_a_replay_says_what_was_recorded_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    write_trace(path, ROWS)
    clock = Clock(monkeypatch, replay_module)
    source = ReplaySource(path)
    gpu, npu = source.boards()
    assert (gpu.key, gpu.kind, gpu.name) == (f"{host_id()}/replayed:n/GPU-1", "gpu", "replayed n/GPU-1")
    assert gpu.simulated
    assert gpu.counter
    assert (npu.kind, npu.counter) == ("npu", False)

    first = source.read(gpu)
    assert (first.time_s, first.power_w, first.energy_j, first.problem) == (1000.0, 100.0, 5000.0, "")
    clock.now = 1001.5
    assert source.read(gpu).energy_j == 5110.0
    assert source.read(gpu).power_w is None
    assert source.read(gpu).problem == "power: missing in the recorded trace"
    assert source.read(gpu, power=False).problem == ""
    assert source.read(npu).power_w == 15.0
    clock.now = 1002.0
    assert source.read(gpu).problem == "energy counter: missing in the recorded trace"
    assert source.read(npu).power_w == 0.0
    clock.now = 1004.0
    assert source.read(gpu).energy_j == 5320.0
    clock.now = 1004.5
    ended = source.read(gpu)
    assert (ended.power_w, ended.energy_j, ended.lost) == (None, None, True)
    assert ended.problem == "the recorded trace has ended"


def test_a_loop_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, replay_module)
    source = ReplaySource(Trace(ROWS), loop=True)
    gpu, npu = source.boards()
    clock.now = 1000.0 + 2 * 4.0 + 1.0
    assert source.read(gpu).energy_j == 5110.0 + 2 * 320.0
    assert source.read(npu).power_w == 15.0
    assert source.recipe() is None


def test_offset_start_and_boards_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, replay_module)
    rows = (TraceRow(0.0, "a", "gpu", 1.0), TraceRow(2.0, "b", "gpu", 2.0))
    source = ReplaySource(Trace(rows), offset_s=1.0, start_s=999.5)
    _, late = source.boards()
    assert source.read(late).problem == "the recorded trace has no reading yet"
    assert not source.read(late).lost
    clock.now = 1000.5
    assert source.read(late).power_w == 2.0


def test_another_process_replays_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(tmp_path / "trace.csv", ROWS)
    clock = Clock(monkeypatch, replay_module)
    source = ReplaySource(tmp_path / "trace.csv", loop=True)
    (gpu, _), recipe = source.boards(), source.recipe()
    assert recipe is not None
    clock.now = 1001.0
    other = ReplaySource(**json.loads(json.dumps(recipe.options)))
    assert other.boards() == source.boards()
    assert other.read(gpu) == source.read(gpu)


def test_wrong_options_of_a_replay() -> None:
    with pytest.raises(InputError, match=r"offset_s is wrong(.|\n)*Got: -1"):
        ReplaySource(Trace(ROWS), offset_s=-1.0)
    with pytest.raises(InputError, match=r"beyond the trace's end(.|\n)*at most 4 s"):
        ReplaySource(Trace(ROWS), offset_s=5.0)
    with pytest.raises(InputError, match="needs a duration"):
        ReplaySource(Trace(ROWS[:2]), loop=True)


@given(
    st.floats(0, 300), st.floats(0, 300), st.floats(0.01, 10), st.floats(0, 1), st.floats(-100, 100), st.floats(0, 50)
)
def test_a_square_waves_energy_is_the_integral_of_its_power(
    low: float, high: float, period: float, duty: float, begin: float, length: float
) -> None:
    wave = SquareWave(low, high, period, duty, phase_s=1.5)
    # exact sum over the pieces between two changes
    changes = {begin, begin + length}
    first, last = math.floor((begin - 1.5) / period) - 1, math.ceil((begin + length - 1.5) / period) + 1
    for k in range(first, last + 1):
        changes |= {1.5 + k * period, 1.5 + (k + duty) * period}
    moments = sorted(t for t in changes if begin <= t <= begin + length)
    expected = sum((b - a) * wave.power_w((a + b) / 2) for a, b in itertools.pairwise(moments))
    assert wave.energy_j(begin, begin + length) == pytest.approx(expected, abs=1e-6 * (1 + low + high))


def test_simulated_boards_say_so_and_know_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, simulated_module)
    wave = SquareWave(50.0, 180.0, 1.0, 0.5, phase_s=1000.0)
    source = SimulatedSource(
        [
            SimulatedBoard(wave, "wave", "gpu", counter=True),
            SimulatedBoard(25.0, "flat"),
            SimulatedBoard(lambda t: t - 1000.0, "ramp"),
        ]
    )
    gpu, flat, ramp = source.boards()
    for board in source.boards():
        assert board.simulated
        assert "simulated" in board.key
        assert "simulated" in board.name
    assert (gpu.kind, gpu.counter, flat.kind, flat.counter) == ("gpu", True, "npu", False)
    clock.now = 1002.75
    assert source.read(gpu).power_w == 50.0
    assert source.read(gpu).energy_j == pytest.approx(2 * 115.0 + 0.5 * 180.0 + 0.25 * 50.0)
    assert source.read(gpu, power=False).power_w is None
    assert (source.read(flat).power_w, source.read(flat).energy_j) == (25.0, None)
    assert source.read(ramp).power_w == 2.75
    assert source.recipe() is None


def test_sensors_hold_their_value_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, simulated_module)
    source = SimulatedSource([SimulatedBoard(lambda t: t - 1000.0, update_s=0.5, noise_w=1.0, seed=3)])
    (board,) = source.boards()
    values = []
    for step in range(400):
        clock.now = 1000.0 + step * 0.125
        values.append(source.read(board).power_w)
    assert all(len(set(values[i : i + 4])) == 1 for i in range(0, 400, 4))
    errors = [values[4 * i] - 0.5 * i for i in range(10, 100)]  # above 5 W, where the noise is not cut off at 0
    assert 0.8 < math.sqrt(sum(e * e for e in errors) / len(errors)) < 1.2


def test_a_board_may_have_a_counter_alone() -> None:
    source = SimulatedSource([SimulatedBoard(10.0, counter=True, power_sensor=False)])
    reading = source.read(source.boards()[0])
    assert reading.power_w is None
    assert reading.energy_j is not None


def test_a_simulated_runtime_is_a_board() -> None:
    runtime, other = (
        SimulatedRuntime(torch.nn.Linear(2, 2), latency_s=0.0, active_w=25.0, idle_w=8.0) for _ in range(2)
    )
    (source,) = runtime.power_sources()
    (board,) = source.boards()
    before, reading, after = runtime.energy_j(), source.read(board), runtime.energy_j()
    assert reading.power_w == 8.0
    assert reading.energy_j is not None
    assert before <= reading.energy_j <= after
    assert (board.kind, board.counter, board.simulated) == ("npu", True, True)
    assert source.recipe() is None
    # one device is one board however often it is asked, two are two
    assert SimulatedSource.of_runtime(runtime).boards() == source.boards()
    assert SimulatedSource.of_runtime(other).boards() != source.boards()


def test_another_process_simulates_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimulatedSource([SimulatedBoard(SquareWave(1.0, 2.0), counter=True), SimulatedBoard(3.0, "1")])
    recipe = source.recipe()
    assert recipe is not None
    other = SimulatedSource(**json.loads(json.dumps(recipe.options)))
    Clock(monkeypatch, simulated_module).now = time.monotonic() + 5
    assert other.boards() == source.boards()
    assert [other.read(board) for board in source.boards()] == [source.read(board) for board in source.boards()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimulatedBoard(1.0, update_s=-1.0), r"update_s is wrong(.|\n)*Got: -1"),
        (lambda: SimulatedBoard(1.0, noise_w=math.inf), r"noise_w is wrong"),
        (lambda: SimulatedBoard(lambda t: t, counter=True), r"'0' cannot have an energy counter"),
        (lambda: SimulatedBoard(1.0, power_sensor=False), r"has no sensor"),
        (lambda: SimulatedSource([]), r"one or more"),
        (lambda: SimulatedSource([SimulatedBoard(1.0), SimulatedBoard(2.0)]), r"a name of its own(.|\n)*'0', '0'"),
    ],
)
def test_wrong_simulated_boards(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]
