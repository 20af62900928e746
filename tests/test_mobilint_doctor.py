# ruff: noqa: F811  # pytest fixtures are imported by name
"""The doctor's Mobilint section: every piece, in each state that it can be in, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from mobilint_parts import board  # noqa: F401
from stubs import StubBoard

from lightning_npu import doctor_mobilint
from lightning_npu.doctor_mobilint import examine_mobilint
from lightning_npu.runtimes.mobilint import library
from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime


def pieces() -> dict[str, tuple[bool, str]]:
    return {name.removeprefix("mobilint "): (ok, text) for name, ok, text in examine_mobilint()}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without board: /dev and /sys are folders of the test."""
    monkeypatch.setattr(library, "DEVICE_FOLDER", str(tmp_path / "dev"))
    monkeypatch.setattr(doctor_mobilint, "SYS", tmp_path / "sys")
    (tmp_path / "dev").mkdir(exist_ok=True)
    return tmp_path


def put_board(folder: Path, vendor: str = "0x209f") -> None:
    place = folder / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    place.mkdir(parents=True)
    (place / "vendor").write_text(f"{vendor}\n")


def test_nothing_is_here(bare: Path) -> None:
    found = pieces()
    assert set(found) == {"driver", "runtime", "cards", "firmware", "monitoring", "compiler"}
    assert found["driver"][0] is False
    assert "no board on the PCI bus (vendor 0x209f): put the board in" in found["driver"][1]
    assert found["cards"] == (False, "none that could be opened: see mobilint driver")
    assert found["firmware"] == (False, "not readable without a driver: see mobilint driver")


def test_a_board_without_driver(bare: Path) -> None:
    put_board(bare)
    assert "1 board(s) on the PCI bus and no device node: no driver is loaded" in pieces()["driver"][1]
    module = bare / "sys" / "module" / "aries"
    module.mkdir(parents=True)
    (module / "version").write_text("1.13.0\n")
    assert "aries 1.13.0 is loaded. Install" in pieces()["driver"][1]


def test_another_vendors_card_is_not_counted(bare: Path) -> None:
    put_board(bare, "0x10de")
    assert "no board on the PCI bus" in pieces()["driver"][1]


def test_a_node_that_may_not_be_opened(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "dev" / "aries0").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    ok, text = pieces()["driver"]
    assert not ok
    assert "aries0 may not be opened by this user: see `ls -l" in text


def test_a_board_that_works(board: Any, stub_mbltml: Callable[..., Any], bare: Path, tmp_path: Path) -> None:
    (bare / "dev" / "aries0").touch()
    stub_mbltml([StubBoard()])
    found = pieces()
    assert found["driver"] == (True, f"of unknown version; {bare / 'dev' / 'aries0'}")
    assert found["cards"][0] is True
    assert "device 0; images at once on each: 8 in core mode single, 2 in global4, 1 in global8" in found["cards"][1]
    assert MobilintRuntime.available().startswith("ok: qbruntime ")
    assert MobilintRuntime.available().endswith("ARIES device 0")


def test_a_board_that_is_hidden(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    board.numbers = []
    monkeypatch.setenv(library.VISIBLE, "7")
    ok, text = pieces()["cards"]
    assert not ok
    assert "qbruntime may open none (QBRUNTIME_VISIBLE_DEVICES=7)" in text
    assert "may open none of" in MobilintRuntime.available()


@pytest.mark.parametrize(
    ("versions", "ok", "words"),
    [
        ({}, False, "mbltml is not installed, so the board's power cannot be read: pip install mobilint-ml"),
        ({"mobilint-ml": "1.5.0"}, None, "mobilint-ml 1.5.0: the newer binding of board power"),
        ({"mbltml": "0.0.0"}, None, "mbltml 0.0.0: the older binding of board power"),
        (
            {"mbltml": "0.0.0", "mobilint-ml": "1.5.0"},
            False,
            "lie over each other, which is undefined: pip uninstall -y",
        ),
    ],
)
def test_monitoring_says_which_form(
    bare: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], ok: bool | None, words: str
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor_mobilint, "version", version)
    found = pieces()["monitoring"]
    assert words in found[1]
    assert ok is None or found[0] is ok


@pytest.mark.parametrize(
    ("installed", "words"),
    [("0.9.0", "0.9.0 is not supported"), ("1.0.0", ">=1.1,<2"), ("2.0.0", "2.0.0 is not supported"), ("1.6.1", None)],
)
def test_versions(bare: Path, monkeypatch: pytest.MonkeyPatch, installed: str, words: str | None) -> None:
    monkeypatch.setattr(library, "version", lambda name: installed)
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    ok, text = pieces()["runtime"]
    assert ok is (words is None)
    assert (words or f"qbruntime {installed}") in text


def test_a_missing_runtime(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert pieces()["runtime"] == (
        False, f"the package {library.DISTRIBUTION} is not installed: pip install 'lightning-npu[mobilint]'"
    )  # fmt: skip
    monkeypatch.setattr("sys.platform", "darwin")
    assert "for Linux and Windows, not for darwin" in pieces()["runtime"][1]


@pytest.mark.parametrize(("compiler", "words"), [("qbcompiler 1.4.0", "compiles here"), (None, "writes a compile kit")])
def test_the_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, words: str) -> None:
    monkeypatch.setattr("lightning_npu.compile.mobilint_compiler.installed_compiler", lambda: compiler)
    ok, text = pieces()["compiler"]
    assert ok is (compiler is not None)
    assert words in text


def test_a_look_that_breaks_does_not_hide_the_rest(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise OSError("no")

    monkeypatch.setattr(library, "device_nodes", broken)
    found = pieces()
    assert found["driver"] == (False, "looking failed: OSError('no')")
    assert len(found) == 6
