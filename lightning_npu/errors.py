"""The package's exceptions; each message says what happened, what was expected, what came, and what to do."""

from __future__ import annotations

from typing import Any


class NPUError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        what: what happened, one sentence.
        expected: what would have been right.
        got: what came instead.
        remedy: what the reader should do now.
    """

    def __init__(self, what: str, *, expected: object = None, got: object = None, remedy: str | None = None) -> None:
        parts = [what]
        if expected is not None:
            parts.append(f"Expected: {expected}")
        if got is not None:
            parts.append(f"Got: {got}")
        if remedy is not None:
            parts.append(f"What to do: {remedy}")
        super().__init__("\n  ".join(parts))
        self.what, self.expected, self.got, self.remedy = what, expected, got, remedy

    @property
    def one_line(self) -> str:
        """What happened, what came, and the remedy, for lists in which other errors stand."""
        got = f" ({self.got})" if self.got is not None else ""
        remedy = f": {self.remedy}" if self.remedy is not None else ""
        return " ".join(f"{self.what.rstrip('.')}{got}{remedy}".split())

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep keyword arguments over pickling, so that the error survives a process boundary."""
        return _rebuild, (type(self), self.what, self.expected, self.got, self.remedy)


def one_line(error: BaseException) -> str:
    """Any error on one line: one of this package as it says itself, another with its kind before its words."""
    return error.one_line if isinstance(error, NPUError) else f"{type(error).__name__}: {' '.join(str(error).split())}"


def _rebuild(kind: type[NPUError], what: str, expected: object, got: object, remedy: str | None) -> NPUError:
    return kind(what, expected=expected, got=got, remedy=remedy)


class ArtifactError(NPUError):
    """An artifact folder is missing, damaged, edited, unsafe, or from a newer version."""


class CompileError(NPUError):
    """A module could not be split, exported or quantized."""


class FidelityError(CompileError):
    """The compiled module's outputs are too far from those of the FP32 module."""


class CompilerMissingError(CompileError):
    """The target's compiler is not installed here; what it needs was written, and the message says how to go on."""


class InputError(NPUError, ValueError):
    """A caller passed inputs of the wrong count, structure, shape, dtype or value."""


class RuntimeUnavailableError(NPUError):
    """The runtime's package, driver or device is not here."""


class DeviceError(NPUError):
    """A device failed while it ran an artifact."""


class PowerUnavailableError(NPUError):
    """A power source's package, driver, permission or board is not here."""
