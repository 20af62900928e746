"""Which power sources there are: this package's, and those that others register by an entry point."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_npu.errors import PowerUnavailableError, one_line
from lightning_npu.plugins import Plugins
from lightning_npu.power.base import ENTRY_POINT_GROUP, PowerSource

SOURCES: Plugins[PowerSource] = Plugins(
    ENTRY_POINT_GROUP,
    PowerSource,  # type: ignore[type-abstract]
    home="lightning_npu.power",
    word="power source",
    error=PowerUnavailableError,
)


def find(name: str) -> type[PowerSource]:
    """The power source that is registered as ``name``; it can be made without arguments.

    Raises:
        PowerUnavailableError: nothing is registered by that name, or what is registered cannot be imported.
    """
    return SOURCES.find(name)


def available() -> Mapping[str, str]:
    """Every registered source's name, with ``"ok: ..."`` or the reason why it has no board here and the remedy."""
    answers: dict[str, str] = {}
    for name in SOURCES.names:
        try:
            answers[name] = find(name).available()
        except Exception as error:  # one broken source must not hide the others
            answers[name] = one_line(error)
    return answers


def auto_sources() -> tuple[list[PowerSource], dict[str, str]]:
    """The registered sources that have boards here, opened, and by name the reasons why the others have none.

    Never raises.
    """
    sources: list[PowerSource] = []
    problems: dict[str, str] = {}
    for name in SOURCES.names:
        try:
            source = find(name)()
            if source.boards():
                sources.append(source)
            else:
                problems[name] = "it has no boards here"
        except Exception as error:  # whatever one of them does, the others are there
            problems[name] = one_line(error)
    return sources, problems
