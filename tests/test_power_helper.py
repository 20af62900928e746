"""The process that reads boards without a counter: it starves for nothing, loses nothing and is never left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_boards import WAVE, FolderSource, alive, wait_until

from lightning_npu.power import remote
from lightning_npu.power.base import BoardEnergy, PowerSource, Reading, SourceRecipe
from lightning_npu.power.helper import Outbox
from lightning_npu.power.monitor import EnergyMonitor, Window
from lightning_npu.power.remote import Helper, ProcessReader, why_not
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource, SquareWave
from lightning_npu.power.wire import Decoder, Encoder, beat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def hold_gil(seconds: float) -> None:
    """What a long C call does that does not release the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def helper_of(monitor: EnergyMonitor) -> int:
    """The helper's pid, once there is one that has read something."""
    assert monitor._session is not None
    (reader,) = monitor._session.reader(ProcessReader)
    assert isinstance(reader, ProcessReader)
    wait_until(lambda: reader.pid is not None and reader.helper_readings > 0, "a helper that reads")
    assert reader.pid is not None
    return reader.pid


def see_a_period(monitor: EnergyMonitor, source: FolderSource) -> None:
    """Who bridges a gap can only allow for powers that were seen."""
    wait_until(lambda: monitor.health()[source.key]["readings"] > 16, "readings over a period")


def only(window: Window) -> BoardEnergy:
    (energy,) = window.by_board.values()
    return energy


def check(window: Window, wave: SquareWave = WAVE) -> None:
    """The truth lies within the stated uncertainty."""
    assert window.ended_s is not None
    assert window.energy_j is not None
    assert window.uncertainty_j is not None
    assert abs(window.energy_j - wave.energy_j(window.started_s, window.ended_s)) <= window.uncertainty_j


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FolderSource]:
    yield FolderSource(str(tmp_path), remote=True)
    for fault in ("hang", "stuck"):
        (tmp_path / fault).unlink(missing_ok=True)


# it does not starve


def gil_run(*, process: bool, interval_s: float = 0.05) -> tuple[Window, SquareWave]:
    """A window in which C code holds the GIL for 3 s, in which the board goes from high power to low."""
    wave = SquareWave(8.0, 25.0, period_s=8.0, duty=3.0 / 8.0, phase_s=time.monotonic() + 1.0)
    with EnergyMonitor([SimulatedSource([SimulatedBoard(wave)])], interval_s, process=process) as monitor:
        with monitor.window() as window:
            time.sleep(max(wave.phase_s + 0.5 - time.monotonic(), 0))
            hold_gil(3.0)
        window.settle()
    return window, wave


def test_a_helper_reads_on_while_c_code_holds_the_gil() -> None:
    window, wave = gil_run(process=True)
    check(window, wave)
    energy = only(window)
    assert energy.coverage > 0.99
    assert energy.gap_j == 0
    assert energy.state == "ok"


def test_a_thread_that_is_held_up_says_so() -> None:
    window, wave = gil_run(process=False)
    check(window, wave)
    energy = only(window)
    assert energy.coverage < 0.6
    assert energy.gap_j > 0


def test_what_the_pipe_does_not_take_waits_in_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PIPE_BYTES", 4096)
    window, wave = gil_run(process=True, interval_s=0.002)
    check(window, wave)
    assert only(window).coverage > 0.99


# it is small and alone


def test_it_imports_the_standard_library_and_little_else() -> None:
    code = (
        "import sys, lightning_npu.power.helper\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    others = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize"))}
    assert others <= {"lightning_npu", "distutils-precedence"}


def test_training_random_states_are_left_alone(source: FolderSource) -> None:
    import random

    random.seed(3)
    state = random.getstate()
    with EnergyMonitor([source]) as monitor:
        helper_of(monitor)
    assert random.getstate() == state


def test_it_does_not_run_the_main_script_again(tmp_path: Path, source: FolderSource) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('run ')\n"
        "from power_boards import FolderSource\n"
        "from lightning_npu.power import EnergyMonitor\n"
        f"with EnergyMonitor([FolderSource({str(tmp_path)!r}, remote=True)]) as monitor:\n"
        "    print(next(iter(monitor.health().values()))['reader'])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["process"]
    assert (tmp_path / "runs").read_text() == "run "
    assert len(set((tmp_path / "opened").read_text().split())) == 2  # main process and helper


def test_a_module_of_the_working_folder_hides_nothing(
    tmp_path: Path, source: FolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')\n")
    monkeypatch.chdir(tmp_path)
    with EnergyMonitor([source]) as monitor:
        helper_of(monitor)
        assert monitor.health()[source.key]["reader"] == "process"


# it ends when it should, and only then


def test_nothing_is_left_after_stop(source: FolderSource) -> None:
    with EnergyMonitor([source]) as monitor:
        pid = helper_of(monitor)
        assert alive(pid)
    assert not Path(f"/proc/{pid}").exists()  # reaped as well
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_nothing_is_left_after_an_exception(source: FolderSource) -> None:
    pids = []

    def fit() -> None:
        with EnergyMonitor([source]) as monitor:
            pids.append(helper_of(monitor))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fit()
    (pid,) = pids
    assert not Path(f"/proc/{pid}").exists()


def test_a_helper_that_hangs_is_killed_at_the_end(source: FolderSource) -> None:
    with EnergyMonitor([source]) as monitor:
        pid = helper_of(monitor)
        source.set("stuck")
    wait_until(lambda: not alive(pid), "the helper is gone")


PARENT = """
import os, sys, time
sys.path.insert(0, {tests!r})
from power_boards import FolderSource
from lightning_npu.power import EnergyMonitor
monitor = EnergyMonitor([FolderSource({folder!r}, remote=True)])
monitor.start()
window = monitor.begin()
if {fork}:  # a worker that inherits the pipes and outlives its parent
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
(reader,) = monitor._session._readers
print(reader.pid, flush=True)
sys.stdin.readline()
{end}
"""


def parent(tmp_path: Path, end: str, *, fork: bool = False) -> tuple[subprocess.Popen[str], int]:
    """A process that monitors; ends as told after a line; with its helper's pid."""
    code = PARENT.format(tests=str(Path(__file__).parent), folder=str(tmp_path), end=end, fork=fork)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a worker"])
@pytest.mark.parametrize("end", ["os._exit(1)", "raise SystemExit", "pass", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_it_ends_with_its_parent(tmp_path: Path, end: str, fork: bool) -> None:
    process, pid = parent(tmp_path, end, fork=fork)
    try:
        assert alive(pid)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
        wait_until(lambda: not alive(pid), "the helper is gone")
    finally:
        if fork:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_it_ends_with_its_parent_though_a_driver_call_hangs(tmp_path: Path) -> None:
    process, pid = parent(tmp_path, "os.kill(os.getpid(), 9)")
    (tmp_path / "hang").touch()
    process.communicate("\n")
    wait_until(lambda: not alive(pid), "the helper is gone")


def test_signals_of_the_user_do_not_end_it(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole foreground group; the energy up to the end of training is still right."""
    end = (
        "try:\n    print('training', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    monitor.stop(); print(window.coverage, flush=True)"
    )
    process, pid = parent(tmp_path, end)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"):
        os.kill(pid, getattr(signal, name))
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "training\n"
    os.killpg(process.pid, signal.SIGINT)
    assert float(process.stdout.readline()) > 0.9
    assert process.wait() == 0
    wait_until(lambda: not alive(pid), "the helper is gone")


def test_it_outlives_the_thread_that_started_the_monitor(source: FolderSource) -> None:
    """Linux ends it with the thread that is its parent: that must not be a passing one."""
    monitor = EnergyMonitor([source])
    passing = threading.Thread(target=monitor.start)
    passing.start()
    passing.join()
    with monitor:
        pid = helper_of(monitor)
        count = monitor.health()[source.key]["readings"]
        wait_until(lambda: monitor.health()[source.key]["readings"] > count + 3, "readings go on")
        assert helper_of(monitor) == pid


# it may fail


def test_a_killed_helper_is_started_anew(source: FolderSource, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_npu.power"), EnergyMonitor([source]) as monitor:
        with monitor.window() as window:
            first = helper_of(monitor)
            see_a_period(monitor, source)
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: not alive(first), "the first helper is gone")
            wait_until(lambda: helper_of(monitor) != first, "a second one reads")
            time.sleep(0.5)  # the window's second half
        window.settle()
        assert monitor.health()[source.key]["reader"] == "process"
    check(window)
    assert any("signal SIGKILL; it is started anew" in message for message in caplog.messages)
    assert not Path(f"/proc/{first}").exists()


def test_a_helper_that_goes_on_dying_is_replaced_by_a_thread(
    source: FolderSource, caplog: pytest.LogCaptureFixture
) -> None:
    with EnergyMonitor([source]) as monitor:
        with monitor.window() as window:
            helper_of(monitor)
            see_a_period(monitor, source)
            source.set("crash")
            wait_until(lambda: monitor.health()[source.key]["reader"] == "thread", "a thread that reads")
            count = monitor.health()[source.key]["readings"]
            wait_until(lambda: monitor.health()[source.key]["readings"] > count + 3, "readings by the thread")
        window.settle()
        check(window)
    assert any("a thread reads for good" in message for message in caplog.messages)


def test_a_helper_that_cannot_open_the_source_is_replaced_by_a_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Elsewhere(FolderSource):
        def recipe(self) -> SourceRecipe:
            return SourceRecipe("power_boards:NoSuchSource", {})

    with EnergyMonitor([Elsewhere(str(tmp_path))]) as monitor, monitor.window() as window:
        wait_until(lambda: next(iter(monitor.health().values()))["readings"] > 3, "readings by the thread")
    check(window)
    assert any("no attribute 'NoSuchSource'; a thread reads for good" in message for message in caplog.messages)


def test_a_helper_that_cannot_be_started_is_replaced_by_a_thread(
    source: FolderSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with EnergyMonitor([source]) as monitor, monitor.window() as window:
        wait_until(lambda: monitor.health()[source.key]["readings"] > 3, "readings by the thread")
    check(window)
    assert any("none could be started" in message for message in caplog.messages)


def test_a_helper_that_hangs_is_killed_and_started_anew(source: FolderSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENCE_S", 0.5)
    with EnergyMonitor([source]) as monitor:
        first = helper_of(monitor)
        source.set("stuck")
        wait_until(lambda: not alive(first), "the helper is killed")
        source.set("stuck", False)
        count = monitor.health()[source.key]["readings"]
        wait_until(lambda: monitor.health()[source.key]["readings"] > count + 3, "readings again")


def test_what_a_board_complains_of_reaches_the_parent(source: FolderSource) -> None:
    with EnergyMonitor([source]) as monitor:
        helper_of(monitor)
        source.set("raise")
        wait_until(lambda: monitor.health()[source.key]["problem"], "a problem")
        assert monitor.health()[source.key]["problem"] == "RuntimeError: the driver has had enough"
        source.set("raise", False)
        wait_until(lambda: not monitor.health()[source.key]["problem"], "recovery")


def test_counters_read_here_and_there_keep_their_order(tmp_path: Path) -> None:
    source = FolderSource(str(tmp_path), counter=True, remote=True)
    windows = []
    with EnergyMonitor([source], 0.002, process=True) as monitor:
        helper_of(monitor)
        for _ in range(20):
            with monitor.window() as window:
                time.sleep(0.01)  # a step
            windows.append(window)
        feed = monitor._session.feeds[0]
    assert feed.late == 0
    for window in windows:
        check(window)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (None, "in this process only"),
        (SourceRecipe("__main__:Mine"), "must not run again"),
        (SourceRecipe("power_boards:FolderSource", {"folder": Path()}), "options are not JSON"),
    ],
)
def test_what_cannot_be_read_by_a_helper_says_why(tmp_path: Path, recipe: SourceRecipe | None, why: str) -> None:
    class Mine(FolderSource):
        def recipe(self) -> SourceRecipe | None:
            return recipe

    assert why in why_not(Mine(str(tmp_path)))
    with EnergyMonitor([Mine(str(tmp_path))], process=True) as monitor:
        assert [health["reader"] for health in monitor.health().values()] == ["thread"]


def test_no_helper_where_python_is_frozen_in(source: FolderSource, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(source) == ""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "no Python interpreter" in why_not(source)


# the pipe

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)
finite = st.floats(allow_nan=False, allow_infinity=False)
readings = st.builds(Reading, finite, st.none() | finite, st.none() | finite, words, st.booleans())


@given(st.lists(st.tuples(st.integers(0, 7), readings), max_size=30), st.data())
def test_readings_survive_the_pipe_however_it_cuts_them(sent: list[tuple[int, Reading]], data: st.DataObject) -> None:
    encoder, decoder = Encoder(), Decoder()
    stream = beat(1.0) + b"".join(frame for board, reading in sent for frame in encoder.encode(board, reading))
    received: list[tuple[int, Reading]] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received.extend(decoder.decode(stream[:cut]))
        stream = stream[cut:]
    expected = [(board, reading) for board, reading in sent]
    assert [(b, r.time_s, r.power_w, r.energy_j, r.lost) for b, r in received] == [
        (b, r.time_s, r.power_w, r.energy_j, r.lost) for b, r in expected
    ]
    for (_, got), (_, want) in zip(received, expected, strict=True):
        assert got.problem == want.problem.encode()[:1000].decode(errors="replace")


def test_the_outbox_keeps_order_and_loses_the_oldest_only() -> None:
    out, into = os.pipe()
    try:
        outbox = Outbox(into, longest=5000)
        frames = [beat(float(number)) for number in range(20000)]
        for frame in frames[:4000]:
            outbox.put(frame)
            outbox.flush()
        received = b""
        os.set_blocking(out, False)
        for frame in frames[4000:]:
            outbox.put(frame)
        while True:
            outbox.flush()
            try:
                received += os.read(out, 1 << 16)
            except BlockingIOError:
                break
        size = len(frames[0])
        got = [received[start : start + size] for start in range(0, len(received), size)]
        assert got[-5000:] == frames[-5000:]
        kept = len(got) - 5000
        assert got[:kept] == frames[:kept]
        os.close(out)
        out = -1
        outbox.put(frames[0])
        with pytest.raises(BrokenPipeError):
            outbox.flush()
    finally:
        os.close(into)
        if out >= 0:
            os.close(out)


def test_a_helper_of_a_source_that_is_not_there_says_what_is_wrong() -> None:
    helper = Helper(SourceRecipe("no_such_module:Source"), [], 0.05)
    helper.process.wait()
    helper.receive()
    assert "No module named 'no_such_module'" in helper.close()


def test_power_source_is_what_recipes_make(source: PowerSource) -> None:
    recipe = source.recipe()
    assert recipe is not None
    from lightning_npu.power.helper import make

    made = make({"factory": recipe.factory, "options": recipe.options})
    assert made.boards() == source.boards()
