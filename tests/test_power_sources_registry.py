"""Which sources there are, and that a broken one hides none of the others."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power import PowerSource, RaplSource, SimulatedSource, registry
from lightning_npu.power.simulated import SimulatedBoard


class Boarded(SimulatedSource):
    """A third party's source with a board."""

    def __init__(self) -> None:
        super().__init__([SimulatedBoard(1.0)])


class Boardless(Boarded):
    def boards(self) -> tuple:
        return ()

    @classmethod
    def available(cls) -> str:
        raise RuntimeError("it\nbroke")


class Failing(Boarded):
    def boards(self) -> tuple:
        raise OSError("no such driver")


class NoDriver(Boarded):
    def boards(self) -> tuple:
        raise PowerUnavailableError("There is\nno driver.", expected="one", got="no node", remedy="install it")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {
        "boarded": f"{__name__}:Boarded",
        "boardless": f"{__name__}:Boardless",
        "failing": f"{__name__}:Failing",
        "nodriver": f"{__name__}:NoDriver",
        "missing": "no_such_module:Source",
        "wrong": "json:dumps",
    }
    points = {name: EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in targets.items()}
    monkeypatch.setattr(registry.SOURCES, "_points", points)


def test_this_packages_sources_are_registered() -> None:
    assert {"mobilint", "nvml", "rapl"} <= set(registry.available())
    assert registry.find("rapl") is RaplSource
    for name in ("mobilint", "nvml", "rapl"):
        assert issubclass(registry.find(name), PowerSource)
        assert registry.find(name).name == name


@pytest.mark.usefixtures("registered")
def test_one_broken_source_hides_no_other() -> None:
    sources, problems = registry.auto_sources()
    assert [type(source) for source in sources] == [Boarded]
    assert problems["boardless"] == "it has no boards here"
    assert problems["failing"] == "OSError: no such driver"
    assert problems["nodriver"] == "There is no driver (no node): install it"
    assert "cannot be imported: ModuleNotFoundError" in problems["missing"]
    assert "which is no PowerSource" in problems["wrong"]
    answers = registry.available()
    assert answers["boarded"].startswith("ok")
    assert answers["boardless"] == "RuntimeError: it broke"
    assert "\n" not in "".join(answers.values())


@pytest.mark.usefixtures("registered")
def test_find_names_what_is_wrong() -> None:
    with pytest.raises(PowerUnavailableError, match=r"no power source named 'nvlm'(.|\n)*'boarded', 'boardless'"):
        registry.find("nvlm")
    with pytest.raises(PowerUnavailableError, match=r"'missing' is registered as no_such_module:Source but cannot"):
        registry.find("missing")
    with pytest.raises(PowerUnavailableError, match=r"json:dumps, which is no PowerSource(.|\n)*subclass of"):
        registry.find("wrong")


@pytest.mark.parametrize(
    "code", ["import lightning_npu.power", "from lightning_npu.power import registry; registry.auto_sources()"]
)
def test_sensors_are_light(code: str) -> None:
    """The process that samples boards imports what it needs and nothing else."""
    heavy = ("torch", "numpy", "lightning", "onnx", "onnxruntime")
    script = f"{code}\nimport sys\nprint(*(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_importing_sensors_opens_no_library() -> None:
    script = (
        "import lightning_npu.power.nvml, lightning_npu.power.mobilint, sys;"
        "print(*(m for m in ('pynvml', 'mbltml') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_simulated_sources_survive_pickling_and_copying() -> None:
    source = SimulatedSource([SimulatedBoard(100.0, counter=True), SimulatedBoard(5.0, name="1")], start_s=0.0)
    for twin in (pickle.loads(pickle.dumps(source)), copy.deepcopy(source)):
        assert twin.boards() == source.boards()
        reading = twin.read(twin.boards()[0])
        assert reading.power_w == 100.0
        assert reading.energy_j == pytest.approx(100.0 * reading.time_s)
