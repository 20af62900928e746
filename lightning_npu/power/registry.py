"""Which power sources there are: this package's, and those that others register by an entry point."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from lightning_npu.errors import NPUError, PowerUnavailableError
from lightning_npu.power.base import ENTRY_POINT_GROUP, PowerSource


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def find(name: str) -> type[PowerSource]:
    """The power source that is registered as ``name``; it can be made without arguments.

    Raises:
        PowerUnavailableError: nothing is registered by that name, or what is registered cannot be imported.
    """
    points = _entry_points()
    if name not in points:
        raise PowerUnavailableError(
            f"There is no power source named '{name}'.",
            expected=f"one of {sorted(points)}",
            got=repr(name),
            remedy="check the spelling, or install the package that brings this source",
        )
    point = points[name]
    try:
        loaded = point.load()
    except Exception as error:  # a third party's package may fail in any way
        raise PowerUnavailableError(
            f"Power source '{name}' is registered as {point.value} but cannot be imported: {error!r}.",
            remedy="reinstall the package that brings it, or uninstall that package",
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, PowerSource)):
        raise PowerUnavailableError(
            f"Power source '{name}' is registered as {point.value}, which is no PowerSource.",
            expected="a subclass of lightning_npu.power.PowerSource",
            got=repr(loaded),
            remedy="report it to the package that brings it",
        )
    return loaded


def available() -> Mapping[str, str]:
    """Every registered source's name, with ``"ok: ..."`` or the reason why it has no board here and the remedy."""
    answers: dict[str, str] = {}
    for name in sorted(_entry_points()):
        try:
            answers[name] = find(name).available()
        except Exception as error:  # one broken source must not hide the others
            answers[name] = _one_line(error)
    return answers


def auto_sources() -> tuple[list[PowerSource], dict[str, str]]:
    """The registered sources that have boards here, opened, and by name the reasons why the others have none.

    Never raises.
    """
    sources: list[PowerSource] = []
    problems: dict[str, str] = {}
    for name in sorted(_entry_points()):
        try:
            source = find(name)()
            if source.boards():
                sources.append(source)
            else:
                problems[name] = "it has no boards here"
        except Exception as error:  # whatever one of them does, the others are there
            problems[name] = _one_line(error)
    return sources, problems


def _one_line(error: Exception) -> str:
    if isinstance(error, NPUError):
        return error.one_line
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
