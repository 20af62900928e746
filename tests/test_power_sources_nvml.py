"""NVIDIA boards: the real pynvml over a stub driver."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stubs import Load, Part, Sensors, StubBoard, StubNvml, no_nvml_library

from lightning_npu.errors import InputError, PowerUnavailableError
from lightning_npu.power import Board, NvmlSource, nvml_boards, retry
from lightning_npu.power.driver import Failure
from lightning_npu.power.host import host_id
from lightning_npu.power.nvml_library import library

CONSTANT = Load.constant(100.0)
IDEAL = StubBoard(CONSTANT, "ideal", name="Stub H100")
OLD = Sensors(Part(0.02, 0.01), Part(0.02), architecture=5)  # as its driver had it before fields of power
UNKNOWN, LOST, NOT_LOADED, NO_PERMISSION, NOT_SUPPORTED = 999, 15, 9, 4, 3


@pytest.fixture
def make() -> Iterator[Callable[..., NvmlSource]]:
    """Makes sources that are closed before their stub goes."""
    made: list[NvmlSource] = []

    def source(*args: Any) -> NvmlSource:
        made.append(NvmlSource(*args))
        return made[-1]

    yield source
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def _sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Clock:
    """The clock of the waits between two attempts to open the library again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(retry, "time", self)

    def monotonic(self) -> float:
        return self.now


StubMaker = Callable[..., StubNvml]
Maker = Callable[..., NvmlSource]


def uuids(source: NvmlSource) -> list[str]:
    return [board.key.removeprefix(f"{host_id()}/") for board in source.boards()]


def test_a_board_and_what_it_says(stub_nvml: StubMaker, make: Maker) -> None:
    stub = stub_nvml([StubBoard(CONSTANT, "ideal", name="Stub H100", uuid="GPU-8f2c", limit_w=700.0)])
    source = make()
    (board,) = source.boards()
    assert board == Board(
        f"{host_id()}/GPU-8f2c", "gpu", "Stub H100", index=0, counter=True, limit_w=700.0, averaging_s=0.0
    )
    before = time.monotonic()
    first, second = source.read(board), source.read(board)
    after = time.monotonic()
    assert before <= first.time_s <= second.time_s <= after
    assert (first.power_w, first.problem, first.lost) == (100.0, "", False)
    assert first.energy_j is not None
    assert second.energy_j is not None
    # the counter counts millijoules
    assert second.energy_j - first.energy_j == pytest.approx(
        stub.truth_j(0, first.time_s, second.time_s), abs=0.1 * (after - before) * 100 + 0.002
    )
    assert source.read(board, power=False).power_w is None
    assert stub.board_calls(0)["other"] == 2  # the limit, twice; utilization and memory are nobody's business here


@pytest.mark.parametrize(
    ("sensors", "averaging_s", "counter", "how"),
    [
        ("a100", 0.0, True, "_instant_w"),
        ("hopper", 0.0, True, "_instant_w"),
        ("hopper-mean", 1.0, True, "_usage_w"),
        (OLD, 0.0, True, "_usage_w"),
        (Sensors(Part(0.02, 0.01), architecture=4), 0.0, False, "_usage_w"),
        (Sensors(Part(0.1), Part(0.1), average=Part(0.1, 1.0), architecture=8), 1.0, True, "_average_w"),
        (Sensors(Part(0.1), architecture=8), 1.0, False, "_usage_w"),
        (Sensors(None, Part(0.1)), 0.0, True, None),
    ],
)
def test_what_is_asked_of_a_board_is_found_by_asking(
    stub_nvml: StubMaker, make: Maker, sensors: Any, averaging_s: float, counter: bool, how: str | None
) -> None:
    stub_nvml([StubBoard(CONSTANT, sensors)])
    source = make()
    (board,) = source.boards()
    assert (board.averaging_s, board.counter) == (averaging_s, counter)
    found = nvml_boards.sensors(library.call("nvmlDeviceGetHandleByIndex", 0))
    assert (found.power_w.__name__ if found.power_w else None) == how
    reading = source.read(board)
    assert reading.problem == ""
    assert reading.power_w == (pytest.approx(100.0) if how else None)
    assert (reading.energy_j is not None) == counter


def test_ga100_is_momentary_and_other_ampere_boards_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((8, 0), 0.0), ((8, 6), 1.0), (None, 0.0)):
        answers = {"nvmlDeviceGetArchitecture": 7, "nvmlDeviceGetCudaComputeCapability": capability}
        monkeypatch.setattr(nvml_boards, "_or_none", lambda name, handle, answers=answers: answers[name])
        assert nvml_boards._usage_averaging_s(None) == expected


def test_what_else_a_board_cannot_say_does_not_matter(stub_nvml: StubMaker, make: Maker) -> None:
    stub_nvml([StubBoard(CONSTANT, "ideal", utilization=False, limit_w=0.0)])
    source = make()
    (board,) = source.boards()
    assert board.limit_w is None
    assert source.read(board).power_w == 100.0


def test_boards_without_any_sensor_are_named(stub_nvml: StubMaker, make: Maker) -> None:
    stub_nvml([StubBoard(CONSTANT, Sensors(None), name="Blind", uuid="GPU-blind"), IDEAL])
    assert uuids(make()) == ["GPU-00000001-1111-2222-3333-444455556666"]
    with pytest.raises(PowerUnavailableError, match=r"Blind GPU-blind: it has neither a power reading nor"):
        make(["GPU-blind"]).boards()


# ---- which boards

TWO = [
    StubBoard(CONSTANT, "ideal", uuid="GPU-aaaa-1", mig=("MIG-1111", "MIG-2222")),
    StubBoard(CONSTANT, "ideal", uuid="GPU-bbbb-2"),
]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("1", ["GPU-bbbb-2"]),
        ("1,0", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-b", ["GPU-bbbb-2"]),
        ("MIG-2222", ["GPU-aaaa-1"]),
        ("MIG-1111,MIG-2222", ["GPU-aaaa-1"]),
        ("MIG-GPU-aaaa-1/1/0", ["GPU-aaaa-1"]),
        ("0,5,1", ["GPU-aaaa-1"]),
    ],
)
def test_boards_that_this_process_sees(
    stub_nvml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    stub_nvml(TWO)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    source = make()
    assert uuids(source) == expected
    assert all(source.read(board).power_w == 100.0 for board in source.boards())


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([0], ["GPU-bbbb-2"]),
        ([1, 0, 1], ["GPU-aaaa-1", "GPU-bbbb-2"]),
        (["cuda:1"], ["GPU-aaaa-1"]),
        ([torch.device("cuda:1"), torch.device("cuda")], ["GPU-aaaa-1", "GPU-bbbb-2"]),
        (["GPU-aaaa", "MIG-1111", 0], ["GPU-aaaa-1", "GPU-bbbb-2"]),
        (["cuda"], ["GPU-bbbb-2"]),
    ],
)
def test_boards_that_are_chosen(
    stub_nvml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch, devices: list[Any], expected: list[str]
) -> None:
    """Ordinals are this process's, UUIDs are physical."""
    stub_nvml(TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert uuids(make(devices)) == expected


def test_uuids_reach_boards_that_cuda_does_not_show(
    stub_nvml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_nvml(TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert uuids(make(["GPU-b"])) == ["GPU-bbbb-2"]
    with pytest.raises(PowerUnavailableError, match=r"No NVIDIA board(.|\n)*2 boards in this machine, CUDA_.*=''"):
        make().boards()
    with pytest.raises(PowerUnavailableError, match=r"no GPU 0\.(.|\n)*ordinal below 0"):
        make([0]).boards()
    with pytest.raises(PowerUnavailableError, match=r"no GPU 'GPU-c'\.(.|\n)*'GPU-aaaa-1', 'GPU-bbbb-2'"):
        make(["GPU-c"]).boards()


@pytest.mark.parametrize("device", ["cpu", "0", "cuda:x", 1.0, None, torch.device("cpu")])
def test_wrong_devices(device: Any) -> None:
    with pytest.raises(InputError, match=r"A device is wrong\.(.|\n)*a CUDA ordinal"):
        NvmlSource([device])


# ---- what is missing


def test_no_library(make: Maker) -> None:
    pytest.importorskip("pynvml")
    with no_nvml_library():
        with pytest.raises(PowerUnavailableError, match=r"shared library not found \(NVML 12\)(.|\n)*driver"):
            make().boards()
        assert "install the NVIDIA driver" in NvmlSource.available()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (NOT_LOADED, r"driver not loaded \(NVML 9\)(.|\n)*sudo modprobe nvidia"),
        (NO_PERMISSION, r"insufficient permissions \(NVML 4\)(.|\n)*/dev/nvidia"),
        (18, r"\(NVML 18\)(.|\n)*restart the machine"),
        (UNKNOWN, r"unknown error \(NVML 999\)(.|\n)*nvidia-smi"),
    ],
)
def test_no_driver(stub_nvml: StubMaker, make: Maker, code: int, message: str) -> None:
    stub = stub_nvml([IDEAL], init_error=code)
    source = make()
    with pytest.raises(PowerUnavailableError, match=message):
        source.boards()
    stub.init_error = 0
    assert len(source.boards()) == 1


def test_no_pynvml(monkeypatch: pytest.MonkeyPatch, make: Maker) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(PowerUnavailableError, match=r"pip install 'lightning-npu\[nvml\]'"):
        make().boards()


def test_available(stub_nvml: StubMaker) -> None:
    stub = stub_nvml([IDEAL, StubBoard(CONSTANT, "pascal", name="Stub P100")])
    assert NvmlSource.available() == "ok: Stub H100 (counter and power), Stub P100 (power only)"
    assert stub.calls["shutdown"] == stub.calls["init"] == 1


# ---- faults


def test_each_quantity_fails_for_itself(stub_nvml: StubMaker, make: Maker) -> None:
    stub = stub_nvml([IDEAL])
    source = make()
    (board,) = source.boards()
    stub.fault(0, "power_error", UNKNOWN)
    reading = source.read(board)
    assert (reading.power_w, reading.problem) == (None, "power: unknown error (NVML 999)")
    assert reading.energy_j is not None
    assert not reading.lost
    stub.clear(0)
    stub.fault(0, "counter_error", NO_PERMISSION)
    reading = source.read(board)
    assert (reading.power_w, reading.energy_j) == (100.0, None)
    assert reading.problem == "energy counter: insufficient permissions (NVML 4)"
    assert stub.calls["init"] == 1  # something works, so the library does
    stub.clear(0)
    assert source.read(board).problem == ""


def test_power_of_0_w_is_power(stub_nvml: StubMaker, make: Maker) -> None:
    stub = stub_nvml([IDEAL])
    source = make()
    stub.fault(0, "power_value", 0.0)
    assert source.read(source.boards()[0]).power_w == 0.0


def test_minus_one_is_no_power(stub_nvml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_nvml([StubBoard(CONSTANT, OLD)])
    source = make()
    (board,) = source.boards()
    monkeypatch.setattr("pynvml.nvmlDeviceGetPowerUsage", lambda handle: 0xFFFFFFFF)
    monkeypatch.setattr("pynvml.nvmlDeviceGetTotalEnergyConsumption", lambda handle: 0xFFFFFFFFFFFFFFFF)
    reading = source.read(board)
    assert (reading.power_w, reading.energy_j) == (None, None)
    assert "power reads -1" in reading.problem
    assert "the counter reads -1" in reading.problem


def test_a_lost_board_is_lost_and_comes_back(stub_nvml: StubMaker, make: Maker, clock: Clock) -> None:
    stub = stub_nvml([IDEAL, IDEAL])
    source = make()
    first, second = source.boards()
    source.read(second)
    stub.fault(0, "lost", LOST)
    reading = source.read(first)
    assert (reading.power_w, reading.energy_j, reading.lost) == (None, None, True)
    assert "gpu is lost (NVML 15)" in reading.problem
    assert source.read(second).power_w == 100.0
    assert source.read(first).lost
    assert stub.calls["init"] == 1  # the other board is read all the while: nothing is shut down under it
    stub.clear(0)
    assert source.read(first).power_w == 100.0


def test_the_driver_is_reloaded(stub_nvml: StubMaker, make: Maker, clock: Clock) -> None:
    stub = stub_nvml([IDEAL])
    source = make()
    (board,) = source.boards()
    before = source.read(board).energy_j
    stub.fault(0, "lost", UNKNOWN)
    stub.init_error = NOT_LOADED
    assert source.read(board).problem.startswith("energy counter: unknown error")
    reading = source.read(board)  # tried at once
    assert (reading.problem, reading.lost) == ("board: driver not loaded (NVML 9)", False)
    attempts = stub.calls["init"]
    for _ in range(3):
        assert source.read(board).power_w is None
    assert stub.calls["init"] == attempts  # not before a second has passed
    stub.clear(0)
    stub.fault(0, "counter_reset", 0.0)
    stub.init_error = 0
    assert source.read(board).power_w is None
    seconds = 0.0
    while (reading := source.read(board)).power_w is None:
        clock.now += 1.0
        seconds += 1.0
        assert seconds < 10
    assert reading.problem == ""
    assert reading.energy_j is not None
    assert before is not None
    assert reading.energy_j < before  # it counts from 0 again, and the source says what the counter says


def test_nobody_waits_for_a_broken_board(stub_nvml: StubMaker, make: Maker) -> None:
    """The training loop reads too, and NVML may take seconds to start."""
    stub = stub_nvml([IDEAL, IDEAL])
    source = make()
    first, second = source.boards()
    stub.fault(0, "lost", LOST)
    assert source.read(first).lost
    held, release = threading.Event(), threading.Event()

    def mend() -> None:
        with library.lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=mend)
    thread.start()
    held.wait(30)
    try:
        assert source.read(first).problem == "board: being looked for by another thread"
        assert source.read(second).power_w == 100.0
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize(
    ("fault", "value"), [("counter_freeze", 0.0), ("counter_add", 1e6), ("counter_wrap", 1000.0), ("power_value", 9e5)]
)
def test_what_the_sensor_says_is_passed_on(stub_nvml: StubMaker, make: Maker, fault: str, value: float) -> None:
    """Freezes, spikes and steps back are for the curve to judge, which sees them in time."""
    stub = stub_nvml([IDEAL])
    source = make()
    (board,) = source.boards()
    before = source.read(board).energy_j
    stub.fault(0, fault, value)
    first, second = source.read(board), source.read(board)
    assert first.problem == second.problem == ""
    assert before is not None
    assert first.energy_j is not None
    if fault == "power_value":
        assert first.power_w == pytest.approx(value)
    elif fault == "counter_freeze":
        assert first.energy_j == second.energy_j
    elif fault == "counter_add":
        assert first.energy_j > before + value
    else:
        assert first.energy_j < value < before


def test_attempts_grow_rare(clock: Clock) -> None:
    backoff, tried = retry.Backoff(), []
    for tick in range(1000):
        clock.now = tick / 10
        if backoff.ready():
            tried.append(clock.now)
            backoff.failed()
    assert tried == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    backoff.succeeded()
    assert backoff.ready()


# ---- processes and threads


def test_making_one_opens_nothing(stub_nvml: StubMaker, make: Maker) -> None:
    stub = stub_nvml([IDEAL])
    source = make([0])
    assert pickle.loads(pickle.dumps(source))._devices == (0,)
    assert sum(stub.calls.values()) == 0


def test_a_forked_child_opens_the_library_for_itself(stub_nvml: StubMaker, make: Maker) -> None:
    stub = stub_nvml([IDEAL])
    source = make()
    (board,) = source.boards()
    handles = stub.calls["handle"]
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with library.lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)  # the child must not wait for a lock that nobody in it holds
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reading = source.read(board)
            os.write(writer, json.dumps([reading.power_w, reading.problem, source.boards()[0].key]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert json.loads(answer.read()) == [100.0, "", board.key]
    release.set()
    thread.join()
    os.waitpid(child, 0)
    assert stub.calls["init"] == 2
    assert stub.calls["handle"] > handles
    assert source.read(board).problem == ""


def test_another_process_reads_the_same_boards(
    stub_nvml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_nvml(TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    source = make()
    recipe = source.recipe()
    script = (
        "import json, sys\nfrom lightning_npu.power.nvml import NvmlSource\n"
        "source = NvmlSource(**json.loads(sys.argv[1]))\n"
        "print(json.dumps([(b.key, source.read(b).power_w) for b in source.boards()]))"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # whatever the other one sees
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(recipe.options)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[source.boards()[0].key, 100.0]]


def test_sources_share_the_library(stub_nvml: StubMaker, make: Maker) -> None:
    stub = stub_nvml(TWO)
    one, other = make([0]), make([1])
    one.boards(), other.boards()
    one.close(), one.close()
    assert other.read(other.boards()[0]).power_w == 100.0
    assert stub.calls["init"] == 1
    assert stub.calls["shutdown"] == 0
    other.close()
    assert stub.calls["shutdown"] == 1
    with pytest.raises(Failure, match="closed"):
        library.call("nvmlDeviceGetCount")
    assert one.read(one.boards()[0]).power_w == 100.0
    assert stub.calls["init"] == 2


def test_threads_read_while_the_library_is_opened_again(stub_nvml: StubMaker, make: Maker) -> None:
    """Readings may be missing meanwhile; none is wrong, nothing raises, and all is well afterwards."""
    stub = stub_nvml([IDEAL, IDEAL])
    source = make()
    boards = source.boards()
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for board in boards:
                try:
                    reading = source.read(board)
                except Exception as error:
                    wrong.append(error)
                    return
                missing = None in (reading.power_w, reading.energy_j)
                if reading.power_w not in (None, 100.0) or missing != bool(reading.problem):
                    wrong.append(reading)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        library.reopen(library.generation)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert stub.calls["init"] >= 51
    assert all(source.read(board).power_w == 100.0 for board in boards)
