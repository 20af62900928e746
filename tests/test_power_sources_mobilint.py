"""Mobilint boards: the real mbltml of both distributions over a stub driver, and mixed-up installations."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from stubs import NPU_LOAD, Load, Sensors, StubBoard, StubMbltml

from lightning_npu.errors import InputError, PowerUnavailableError
from lightning_npu.power import Board, MobilintSource, mobilint_library, retry
from lightning_npu.power.host import host_id
from lightning_npu.power.mobilint_library import library

CONSTANT = Load.constant(15.5)
IDEAL = StubBoard(CONSTANT, "ideal")
REGULUS = StubBoard(CONSTANT, Sensors(None), target_type=4)
OLD = Path(sys.prefix) / "mbltml-0.0.0"
forms = pytest.mark.parametrize("form", ["1.5.0", "0.0.0"])
StubMaker = Callable[..., StubMbltml]
Maker = Callable[..., MobilintSource]


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes sources that are closed before their stub goes."""
    made: list[MobilintSource] = []

    def source(*args: Any) -> MobilintSource:
        made.append(MobilintSource(*args))
        return made[-1]

    yield source
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def _sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QBRUNTIME_VISIBLE_DEVICES", raising=False)


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


def ids(source: MobilintSource) -> list[str]:
    return [board.key.removeprefix(f"{host_id()}/") for board in source.boards()]


@forms
def test_a_board_and_what_it_says(stub_mbltml: StubMaker, make: Maker, form: str) -> None:
    stub = stub_mbltml([IDEAL], form=form)
    source = make()
    (board,) = source.boards()
    key = "aries-rb@0000:10:00.0" if form == "1.5.0" else "aries-rb:aries0"
    assert board == Board(f"{host_id()}/{key}", "npu", "Mobilint aries-rb", index=0, counter=False)
    before = time.monotonic()
    reading = source.read(board)
    assert before <= reading.time_s <= time.monotonic()
    assert (reading.power_w, reading.energy_j, reading.problem, reading.lost) == (15.5, None, "", False)
    calls = stub.board_calls(0)["power"]
    assert source.read(board, power=False).power_w is None
    assert stub.board_calls(0)["power"] == calls


@forms
def test_power_follows_the_load(stub_mbltml: StubMaker, make: Maker, form: str) -> None:
    stub = stub_mbltml([StubBoard(NPU_LOAD, "ideal")], form=form)
    source = make()
    (board,) = source.boards()
    for _ in range(50):
        reading = source.read(board)
        assert reading.power_w in (8.0, 25.0)
    stub.span(0, 12.25, for_s=60.0)
    assert source.read(board).power_w == 12.25


@forms
def test_devices_and_what_the_runtime_is_shown(
    stub_mbltml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    stub_mbltml([IDEAL, IDEAL, IDEAL], form=form)
    all_ids = ids(make())
    assert len(set(all_ids)) == 3
    assert ids(make([2, 0])) == [all_ids[0], all_ids[2]]
    monkeypatch.setenv("QBRUNTIME_VISIBLE_DEVICES", "1, 2")
    assert ids(make()) == all_ids[1:]
    assert ids(make([0])) == all_ids[:1]
    monkeypatch.setenv("QBRUNTIME_VISIBLE_DEVICES", "x")
    assert ids(make()) == all_ids
    with pytest.raises(PowerUnavailableError, match=r"device \[7\](.|\n)*'aries-rb 0', 'aries-rb 1', 'aries-rb 2'"):
        make([7]).boards()
    for wrong in ([-1], ["0"]):
        with pytest.raises(InputError, match="Mobilint device is wrong"):
            MobilintSource(wrong)


def test_other_devices_count_for_themselves(stub_mbltml: StubMaker, make: Maker) -> None:
    """Numbers are those within a target type; a board without a power reading is none."""
    stub_mbltml([REGULUS, StubBoard(CONSTANT, "ideal", slot="0-1-2")], form="1.5.0")
    source = make()
    assert ids(source) == ["aries-rb@0-1-2"]
    assert source.boards()[0].index == 0


@forms
def test_no_board_with_a_power_reading(stub_mbltml: StubMaker, make: Maker, form: str) -> None:
    stub_mbltml([REGULUS], form=form)
    with pytest.raises(PowerUnavailableError, match=r"ARIES only(.|\n)*regulus-rb 0 has no power reading"):
        make().boards()


def test_devices_in_one_slot_are_told_apart(stub_mbltml: StubMaker, make: Maker) -> None:
    stub_mbltml([StubBoard(CONSTANT, "ideal", slot="0-1-2"), StubBoard(CONSTANT, "ideal", slot="0-1-2")], form="1.5.0")
    assert ids(make()) == ["aries-rb@0-1-2/aries0", "aries-rb@0-1-2/aries1"]
    assert ids(make([1])) == ["aries-rb@0-1-2/aries1"]


def test_without_a_slot_node_and_chip_tell_boards_apart(stub_mbltml: StubMaker, make: Maker) -> None:
    boards = [StubBoard(CONSTANT, "ideal", slot="", chip_id=77), StubBoard(CONSTANT, "ideal", slot="")]
    stub_mbltml(boards, form="1.5.0")
    assert ids(make()) == ["aries-rb:aries0#77", "aries-rb:aries1"]


# ---- faults


@forms
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_unavailable_is_missing_not_zero(stub_mbltml: StubMaker, make: Maker, form: str, value: float) -> None:
    stub = stub_mbltml([IDEAL], form=form)
    source = make()
    (board,) = source.boards()
    inits = stub.calls["init"]
    stub.fault(0, "power_value", value)
    for _ in range(3):
        reading = source.read(board)
        assert (reading.power_w, reading.lost) == (None, False)
        assert reading.problem == f"power: it reads {value:g}, which stands for unavailable"
    assert stub.calls["init"] == inits
    stub.clear(0)
    stub.fault(0, "power_value", 0.0)
    assert source.read(board).power_w == 0.0


@forms
def test_a_lost_board_comes_back(stub_mbltml: StubMaker, make: Maker, clock: Clock, form: str) -> None:
    stub = stub_mbltml([IDEAL, IDEAL], form=form)
    source = make()
    first, second = source.boards()
    source.read(second)
    inits = stub.calls["init"]
    stub.fault(0, "lost", 6)
    reading = source.read(first)
    assert (reading.power_w, reading.lost, reading.problem) == (None, True, "power: device not found (mbltml 6)")
    assert source.read(second).power_w == 15.5
    reading = source.read(first)
    assert (reading.lost, reading.problem) == (True, "board: device not found (mbltml 6)")
    assert stub.calls["init"] == inits
    stub.clear(0)
    assert source.read(first).power_w == 15.5


@forms
def test_the_driver_is_reloaded(
    stub_mbltml: StubMaker, make: Maker, clock: Clock, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    stub = stub_mbltml([IDEAL], form=form)
    source = make()
    (board,) = source.boards()
    stub.fault(0, "power_error", 99)  # a code that the binding has no text for
    stub.init_error = 1
    assert source.read(board).problem == "power: unknown error (mbltml 99)"
    assert "no driver installed (mbltml 1)" in source.read(board).problem
    attempts = stub.calls["init"]
    for _ in range(3):
        assert source.read(board).power_w is None
    assert stub.calls["init"] == attempts
    stub.clear(0)
    stub.init_error = 0
    seconds = 0.0
    while source.read(board).power_w is None:
        clock.now += 1.0
        seconds += 1.0
        assert seconds < 10
    assert source.read(board).power_w == 15.5
    assert capfd.readouterr().err == ""


def test_what_the_binding_lets_pass_does_not_get_out(
    stub_mbltml: StubMaker, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_mbltml([IDEAL])
    source = make()
    (board,) = source.boards()
    monkeypatch.setattr("mbltml.mbltml.mbltmlGetTotalPower", lambda *args: b"\xff".decode())
    reading = source.read(board)
    assert reading.power_w is None
    assert "unicodedecodeerror" in reading.problem


# ---- what is missing


@forms
def test_no_driver(
    stub_mbltml: StubMaker, make: Maker, capfd: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, form: str,
) -> None:  # fmt: skip
    stub = stub_mbltml([IDEAL], form=form, init_error=1)
    source = make()
    with pytest.raises(PowerUnavailableError, match=r"no driver for Mobilint boards(.|\n)*docs\.mobilint\.com"):
        source.boards()
    assert "no driver for Mobilint" in MobilintSource.available()
    assert capfd.readouterr().err == ""  # where the vendor's complaint would be
    assert stub.calls["init"] == 2
    # where there are device nodes the library is started here, and whatever it has to say is to be seen
    (tmp_path / "aries0").touch()
    monkeypatch.setattr(mobilint_library, "DEVICE_FOLDER", str(tmp_path))
    with pytest.raises(PowerUnavailableError, match="no driver for Mobilint boards"):
        source.boards()
    assert "No driver installed" in capfd.readouterr().err
    stub.init_error = 0
    assert len(source.boards()) == 1


def test_the_vendors_own_library_without_a_driver(make: Maker, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mbltml", reason="mobilint-ml is not installed")
    if any(any(Path("/dev").glob(pattern)) for pattern in mobilint_library.DEVICE_NODES):
        pytest.skip("this machine has Mobilint boards")
    with pytest.raises(PowerUnavailableError, match="no driver for Mobilint boards"):
        make().boards()
    assert capfd.readouterr().err == ""


def test_another_failure_of_the_start(stub_mbltml: StubMaker, make: Maker) -> None:
    stub_mbltml([IDEAL], init_error=3)
    with pytest.raises(PowerUnavailableError, match=r"cannot be opened: (.|\n)*\(mbltml 3\)(.|\n)*mobilint-cli status"):
        make().boards()


def test_no_mbltml(monkeypatch: pytest.MonkeyPatch, make: Maker) -> None:
    monkeypatch.setattr(mobilint_library, "find_spec", lambda name: None)
    with pytest.raises(PowerUnavailableError, match=r"not installed(.|\n)*pip install mobilint-ml"):
        make().boards()


def test_available(stub_mbltml: StubMaker) -> None:
    stub = stub_mbltml([IDEAL, IDEAL])
    assert MobilintSource.available() == "ok: Mobilint aries-rb 0 (power only), Mobilint aries-rb 1 (power only)"
    assert stub.calls["shutdown"] == 1


# ---- two distributions in one environment


def put(package: str, folder: Path) -> None:
    """Install a distribution as pip does: its files over what is there."""
    if package == "mbltml":
        if not OLD.is_dir():
            pytest.skip(f"no mbltml 0.0.0 in {OLD}")
        for path in OLD.iterdir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        return
    try:
        found = distribution("mobilint-ml")
    except ImportError:
        pytest.skip("mobilint-ml is not installed")
    for file in found.files or ():
        if "__pycache__" not in file.parts:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found.locate_file(file), folder / file)


def remove(package: str, folder: Path) -> None:
    """Uninstall it as pip does: by the list of its files, whoever's they are by now."""
    info = next(folder.glob(f"{package.replace('-', '_')}-*.dist-info"))
    for line in (info / "RECORD").read_text().splitlines():
        (folder / line.split(",")[0]).unlink(missing_ok=True)
    shutil.rmtree(info, ignore_errors=True)


def answer_in(folder: Path, **env: str) -> str:
    script = "from lightning_npu.power.mobilint import MobilintSource; print(MobilintSource.available())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("order", [("mbltml", "mobilint-ml"), ("mobilint-ml", "mbltml")])
def test_both_installed(tmp_path: Path, order: tuple[str, str]) -> None:
    for package in order:
        put(package, tmp_path)
    answer = answer_in(tmp_path)
    assert f"mbltml and mobilint-ml lie over each other in {tmp_path}" in answer
    assert "pip uninstall -y mbltml mobilint-ml && pip install mobilint-ml" in answer


def test_one_taken_away_again(tmp_path: Path) -> None:
    """The other's files went with it."""
    put("mobilint-ml", tmp_path)
    put("mbltml", tmp_path)
    remove("mbltml", tmp_path)
    assert not (tmp_path / "mbltml" / "mbltml.py").exists()
    answer = answer_in(tmp_path)
    # python passes by a folder without an __init__.py when a later one on its path has it
    if "has no mbltml.py" not in answer:
        assert "There is no driver" in answer
    (tmp_path / "mbltml" / "__init__.py").touch()
    answer = answer_in(tmp_path)
    assert f"{tmp_path}/mbltml has no mbltml.py, as one of the two left it" in answer
    assert "pip uninstall -y mbltml mobilint-ml && pip install mobilint-ml" in answer


@pytest.mark.parametrize("python", ["mbltml", "mobilint-ml"])
def test_python_of_the_one_and_library_of_the_other(tmp_path: Path, python: str) -> None:
    """As when the two were installed by different tools, and nothing is recorded."""
    other = {"mbltml": "mobilint-ml", "mobilint-ml": "mbltml"}[python]
    put(python, tmp_path / "a")
    put(other, tmp_path / "b")
    (tmp_path / "mixed" / "mbltml").mkdir(parents=True)
    for name in ("__init__.py", "mbltml.py"):
        shutil.copy(tmp_path / "a" / "mbltml" / name, tmp_path / "mixed" / "mbltml")
    library_file = next((tmp_path / "b" / "mbltml").glob("libmbltml.so*"))
    shutil.copy(library_file, tmp_path / "mixed" / "mbltml")
    answer = answer_in(tmp_path / "mixed")
    assert f"mbltml.py is that of {python}, {library_file.name} that of {other}" in answer
    (tmp_path / "mixed" / "mbltml" / library_file.name).unlink()
    assert f"{tmp_path}/mixed/mbltml has no libmbltml.so" in answer_in(tmp_path / "mixed")


@pytest.mark.parametrize("package", ["mbltml", "mobilint-ml"])
def test_each_by_itself_is_fine(tmp_path: Path, package: str) -> None:
    put(package, tmp_path)
    assert "There is no driver for Mobilint boards" in answer_in(tmp_path)


def test_a_form_that_nobody_knows(tmp_path: Path) -> None:
    put("mobilint-ml", tmp_path)
    path = tmp_path / "mbltml" / "mbltml.py"
    path.write_text(path.read_text() + "\ndef mbltmlGetTotalPower(a, b, c): ...\n")
    assert "This version of mbltml is not known" in answer_in(tmp_path)
    path.write_text("import no_such_module\n")
    assert "mbltml is installed but cannot be used: ModuleNotFoundError" in answer_in(tmp_path)


# ---- processes and threads


def test_making_one_opens_nothing(stub_mbltml: StubMaker, make: Maker) -> None:
    stub = stub_mbltml([IDEAL])
    assert pickle.loads(pickle.dumps(make([0])))._numbers == (0,)
    assert sum(stub.calls.values()) == 0


@forms
def test_a_forked_child_opens_the_library_for_itself(stub_mbltml: StubMaker, make: Maker, form: str) -> None:
    stub = stub_mbltml([IDEAL], form=form)
    source = make()
    (board,) = source.boards()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with library.lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    reader, writer = os.pipe()
    before = stub.calls["init"]
    child = os.fork()
    if child == 0:
        try:
            reading = source.read(board)
            os.write(writer, json.dumps([reading.power_w, reading.problem]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert json.loads(answer.read()) == [15.5, ""]
    release.set()
    thread.join()
    os.waitpid(child, 0)
    assert stub.calls["init"] > before
    assert source.read(board).power_w == 15.5


@forms
def test_another_process_reads_the_same_boards(stub_mbltml: StubMaker, make: Maker, form: str) -> None:
    stub_mbltml([IDEAL, IDEAL], form=form)
    source = make([1])
    recipe = source.recipe()
    script = (
        "import json, sys\nfrom lightning_npu.power.mobilint import MobilintSource\n"
        "source = MobilintSource(**json.loads(sys.argv[1]))\n"
        "print(json.dumps([(b.key, source.read(b).power_w) for b in source.boards()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(recipe.options)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[source.boards()[0].key, 15.5]]
    assert done.stderr == ""


@forms
def test_threads_read_while_the_library_is_opened_again(stub_mbltml: StubMaker, make: Maker, form: str) -> None:
    stub_mbltml([IDEAL, IDEAL], form=form)
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
                if reading.power_w not in (None, 15.5) or (reading.power_w is None) != bool(reading.problem):
                    wrong.append(reading)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        library.reopen(library.generation)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(source.read(board).power_w == 15.5 for board in boards)
