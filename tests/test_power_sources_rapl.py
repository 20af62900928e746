"""RAPL over a folder tree like that of Linux."""

from __future__ import annotations

import builtins
import io
import re
from pathlib import Path

import pytest

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power import RaplSource
from lightning_npu.power.host import host_id


def zone(root: Path, folder: str, name: str, uj: int = 1_000_000, wrap_uj: int | None = 262_143_328_850) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{uj}\n")
    if wrap_uj is not None:
        (path / "max_energy_range_uj").write_text(f"{wrap_uj}\n")
    return path


def labels(source: RaplSource) -> list[str]:
    return [board.key.removeprefix(f"{host_id()}/rapl-") for board in source.boards()]


def deny(monkeypatch: pytest.MonkeyPatch, denied: Path) -> None:
    """Root may read everything, so that a file's mode alone would deny nothing here."""
    real = io.open

    def opened(file: object, *args: object, **options: object) -> object:
        if file == denied:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(builtins, "open", opened)


def test_a_laptop_is_package_and_memory_without_what_they_include(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 10_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 4_000_000)
    zone(tmp_path, "intel-rapl:0:1", "uncore", 1_000_000)
    zone(tmp_path, "intel-rapl:0:2", "dram", 3_000_000, wrap_uj=65_712_999_613)
    zone(tmp_path, "intel-rapl:1", "psys", 20_000_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 10_000_000)
    (tmp_path / "intel-rapl").mkdir()  # the control type itself lies beside its zones
    source = RaplSource(tmp_path)
    assert labels(source) == ["package-0", "package-0-dram"]
    package, memory = source.boards()
    assert (package.kind, package.name, package.counter) == ("cpu", "CPU package 0", True)
    assert memory.name == "memory of CPU package 0"
    assert package.wrap_j == pytest.approx(262_143.32885)
    assert memory.wrap_j == pytest.approx(65_712.999613)
    assert sum(source.read(board).energy_j or 0 for board in source.boards()) == pytest.approx(13.0)
    assert source.read(package).power_w is None
    assert source.boards() is source.boards()


def test_parts_are_found_where_they_lie_only_inside_of_their_zone(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0")
    zone(package, "intel-rapl:0:0", "dram", 7)
    assert labels(RaplSource(tmp_path)) == ["package-0", "package-0-dram"]


def test_two_sockets(tmp_path: Path) -> None:
    for number in range(2):
        zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 5_000_000)  # equal by chance: not the same socket
        zone(tmp_path, f"intel-rapl:{number}:0", "dram", 5_000_000)
    assert labels(RaplSource(tmp_path)) == ["package-0", "package-0-dram", "package-1", "package-1-dram"]


def test_dies_that_repeat_their_package_count_once(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0-die-0", 68_000_000)
    zone(tmp_path, "intel-rapl:1", "package-0-die-1", 68_000_000)
    zone(tmp_path, "intel-rapl:2", "package-1-die-0", 68_000_000)
    zone(tmp_path, "intel-rapl:3", "package-1-die-1", 68_000_000)
    assert labels(RaplSource(tmp_path)) == ["package-0-die-0", "package-1-die-0"]


def test_dies_with_counters_of_their_own_all_count(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0-die-0", 68_000_000)
    zone(tmp_path, "intel-rapl:1", "package-0-die-1", 71_000_000)
    assert labels(RaplSource(tmp_path)) == ["package-0-die-0", "package-0-die-1"]


def test_amd_has_no_memory_zone(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0")
    zone(tmp_path, "intel-rapl:0:0", "core")
    assert labels(RaplSource(tmp_path)) == ["package-0"]


def test_mmio_packages_stand_in_where_there_are_no_others(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl-mmio:0", "package-0")
    zone(tmp_path, "intel-rapl:0", "psys")
    assert labels(RaplSource(tmp_path)) == ["package-0"]


def test_the_platform_stands_in_where_there_is_nothing_else(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "psys")
    assert labels(RaplSource(tmp_path)) == ["psys"]


def test_a_counter_without_a_stated_range_has_no_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", wrap_uj=None)
    assert RaplSource(tmp_path).boards()[0].wrap_j is None


def test_counters_for_root_alone_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0")
    deny(monkeypatch, path / "energy_uj")
    with pytest.raises(PowerUnavailableError, match="root only") as caught:
        RaplSource(tmp_path).boards()
    assert f"sudo chmod a+r {tmp_path}/intel-rapl*/energy_uj" in str(caught.value)


def test_the_command_reaches_every_counter_that_is_read(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0")
    zone(tmp_path, "intel-rapl:0:0", "dram")
    assert {path.parent.name for path in tmp_path.glob("intel-rapl*/energy_uj")} == {"intel-rapl:0", "intel-rapl:0:0"}


def test_permission_that_is_taken_away_later_is_a_problem_not_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0")
    source = RaplSource(tmp_path)
    (board,) = source.boards()
    with monkeypatch.context() as patch:
        deny(patch, path / "energy_uj")
        reading = source.read(board)
    assert (reading.energy_j, reading.problem, reading.lost) == (None, "energy counter: permission denied", False)
    assert source.read(board).energy_j == pytest.approx(1.0)


def test_a_zone_that_goes_and_comes_back(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0")
    source = RaplSource(tmp_path)
    (board,) = source.boards()
    (path / "energy_uj").rename(path / "gone")
    reading = source.read(board)
    assert reading.lost
    assert reading.problem == "energy counter: no such file or directory"
    (path / "gone").rename(path / "energy_uj")
    assert not source.read(board).lost


def test_nonsense_in_a_counter_is_a_problem(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0")
    source = RaplSource(tmp_path)
    (board,) = source.boards()
    (path / "energy_uj").write_text("")
    reading = source.read(board)
    assert reading.energy_j is None
    assert reading.problem.startswith("energy counter: ")
    with pytest.raises(PowerUnavailableError, match=r"cannot be read: (.|\n)*dmesg"):
        RaplSource(tmp_path).boards()


def test_no_counters_at_all(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(PowerUnavailableError, match=re.escape(f"no RAPL counters under {root}")) as caught:
            RaplSource(root).boards()
        assert "sudo modprobe intel_rapl_msr" in str(caught.value)


def test_another_process_can_make_the_same(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0")
    source = RaplSource(tmp_path)
    recipe = source.recipe()
    assert recipe.factory == "lightning_npu.power.rapl:RaplSource"
    assert RaplSource(**recipe.options).boards() == source.boards()
