"""Classes that packages register by entry points: this package's own, and those of others."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from lightning_npu.errors import NPUError

T = TypeVar("T")


class Plugins(Generic[T]):
    """The subclasses of one class that are registered in one entry-point group.

    Args:
        group: the entry-point group.
        base: what each of them derives from.
        home: where users import ``base`` from, for messages.
        word: what one of them is called in messages.
        error: raised for those that cannot be had.
        also: what users may write instead of a name, for messages.
    """

    def __init__(
        self, group: str, base: type[T], *, home: str, word: str, error: type[NPUError], also: str = ""
    ) -> None:
        self._group, self._base, self._home, self._word = group, base, home, word
        self._error, self._also = error, also
        self._points: dict[str, EntryPoint] | None = None

    @property
    def points(self) -> dict[str, EntryPoint]:
        """The entry points by name; looked for once."""
        if self._points is None:
            self._points = {point.name: point for point in entry_points(group=self._group)}
        return self._points

    @property
    def names(self) -> list[str]:
        """What is registered."""
        return sorted(self.points)

    def forget(self) -> None:
        """Look again: packages came or went."""
        self._points = None

    def find(self, name: str) -> type[T]:
        """The class that is registered as ``name``.

        Raises:
            NPUError: of the kind of this registry: nothing is registered by that name, or what is registered cannot be
                imported, or is something else.
        """
        points, base = self.points, self._base.__name__
        if name not in points:
            raise self._error(
                f"There is no {self._word} named '{name}'.",
                expected=f"{self._also}one of {sorted(points)}",
                got=repr(name),
                remedy=f"check the spelling, or install the package that brings this {self._word.split()[-1]}",
            )
        registered = f"{self._word.capitalize()} '{name}' is registered as {points[name].value}"
        try:
            loaded = points[name].load()
        except Exception as error:  # a third party's package may fail in any way
            raise self._error(
                f"{registered} but cannot be imported: {error!r}.",
                remedy="reinstall the package that brings it, or uninstall that package",
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, self._base)):
            raise self._error(
                f"{registered}, which is no {base}.",
                expected=f"a subclass of {self._home}.{base}",
                got=repr(loaded),
                remedy="report it to the package that brings it",
            )
        return loaded
