"""Context managers that put a stub library under the real binding, in this process and in its children."""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from unittest import mock

from typing_extensions import Self

from . import build
from .boards import StubBoard, load_j
from .control import CALLS, FAULTS, MAX_BOARDS, MAX_FAULTS, MAX_SPANS, open_control
from .fill import fill


class BindingMissing(Exception):
    """The vendor's Python binding, in the form that is asked for, is not there."""


class Stub:
    """A stub library with boards. See the package's docstring."""

    variable: ClassVar[str]

    def __init__(self, boards: Sequence[StubBoard] = (StubBoard(),), *, init_error: int = 0, call_s: float = 0.0):
        if len(boards) > MAX_BOARDS:
            raise ValueError(f"at most {MAX_BOARDS} boards, got {len(boards)}")
        self._scratch = Path(tempfile.mkdtemp(prefix="stub-"))
        self._path = self._scratch / "control"
        self._control = open_control(self._path)
        # a random moment, so that ticks of sensors are at no fixed distance from the test's own steps
        start = time.monotonic() - random.random()
        self.boards = tuple(board.with_phase(i, start) for i, board in enumerate(boards))
        for index, board in enumerate(self.boards):
            fill(self._control.boards[index], board, index, start)
            if not board.utilization:
                self.fault(index, "other_error", self.not_supported, after_s=-1e6)
        self._control.n_boards = len(boards)
        self.init_error, self.call_s = init_error, call_s
        self._stack = ExitStack()
        self.env: dict[str, str] = {}

    not_supported: ClassVar[int]

    @property
    def init_error(self) -> int:
        """Status code of the library's start; 0: it starts."""
        return int(self._control.init_error)

    @init_error.setter
    def init_error(self, code: int) -> None:
        self._control.init_error = code

    @property
    def call_s(self) -> float:
        """Seconds that every reading takes."""
        return float(self._control.call_s)

    @call_s.setter
    def call_s(self, seconds: float) -> None:
        self._control.call_s = seconds

    @property
    def calls(self) -> dict[str, int]:
        """Calls from all processes since the start, by kind."""
        return dict(zip(CALLS, self._control.calls, strict=True))

    def board_calls(self, board: int) -> dict[str, int]:
        """The same, of one board."""
        return dict(zip(CALLS, self._control.boards[board].calls, strict=True))

    def fault(
        self, board: int, kind: str, value: float = 0.0, *, after_s: float = 0.0, for_s: float | None = None
    ) -> tuple[float, float]:
        """Break something of ``board`` in ``after_s``, for ``for_s`` (None: for good); returns from when to when."""
        t0 = time.monotonic() + after_s
        t1 = 1e18 if for_s is None else t0 + for_s
        faults = self._control.boards[board].faults
        free = next((i for i in range(MAX_FAULTS) if faults[i].kind == 0), None)
        if free is None:
            raise ValueError(f"board {board} has {MAX_FAULTS} faults already: clear it first")
        faults[free].t0, faults[free].t1, faults[free].value = t0, t1, value
        faults[free].kind = FAULTS[kind]  # last: from now on it counts
        return t0, t1

    def clear(self, board: int) -> None:
        """Mend everything of ``board``."""
        for fault in self._control.boards[board].faults:
            fault.kind = 0

    def span(self, board: int, power_w: float, *, after_s: float = 0.0, for_s: float) -> tuple[float, float]:
        """Let ``board`` draw ``power_w`` for a while, whatever its load; spans must not overlap."""
        struct = self._control.boards[board]
        if struct.n_spans == MAX_SPANS:
            raise ValueError(f"board {board} has {MAX_SPANS} spans already")
        t0 = time.monotonic() + after_s
        span = struct.spans[struct.n_spans]
        span.t0, span.t1, span.power_w = t0, t0 + for_s, power_w
        struct.n_spans += 1
        return t0, t0 + for_s

    def truth_j(self, board: int, t0: float, t1: float) -> float:
        """Exact energy of ``board`` between two moments of ``time.monotonic()``, in joules."""
        load, bits = self.boards[board].load, self.boards[board].telegraph_bits(board)
        total, at = 0.0, t0
        struct = self._control.boards[board]
        for span in sorted((struct.spans[i] for i in range(struct.n_spans)), key=lambda span: span.t0):
            begin, end = max(at, span.t0), min(t1, span.t1)
            if end > begin:
                total += load_j(load, bits, at, begin) + span.power_w * (end - begin)
                at = end
        return total + load_j(load, bits, at, t1)

    def __enter__(self) -> Self:
        with self._stack:
            self._enter()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter(self) -> None:
        self._stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        self._put_under()
        self._stack.enter_context(mock.patch.dict(os.environ, self.env))

    def _put_under(self) -> None:
        raise NotImplementedError

    def _attach(self, path: Path) -> ctypes.CDLL:
        stub = ctypes.CDLL(str(path))
        stub.stub_attach.argtypes = [ctypes.c_char_p]
        for name in ("stub_power_w", "stub_counter_j"):
            getattr(stub, name).argtypes, getattr(stub, name).restype = [ctypes.c_int, ctypes.c_double], ctypes.c_double
        stub.stub_truth_j.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
        stub.stub_truth_j.restype = ctypes.c_double
        if not stub.stub_attach(os.fsencode(self._path)):
            raise RuntimeError(f"the stub cannot map {self._path}: control.py and trace_model.h differ")
        self._stack.callback(stub.stub_attach, None)
        stub.stub_forget_users()
        self._stack.callback(stub.stub_forget_users)
        self.env[self.variable] = str(self._path)
        return stub


class StubNvml(Stub):
    """libnvidia-ml.so.1 under the real pynvml."""

    variable = "LIGHTNING_NPU_STUB_NVML"
    not_supported = 3

    def _put_under(self) -> None:
        path = build.library("nvml")
        self.c = self._attach(path)
        self.env["LD_LIBRARY_PATH"] = _before(path.parent, "LD_LIBRARY_PATH")
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError:
            return  # nothing to put it under in this process; children may have the binding
        # a real driver of this name may be loaded already, so the binding is handed the stub itself
        self._stack.enter_context(_pynvml_state(pynvml, self.c))


class StubMbltml(Stub):
    """libmbltml.so under the real mbltml of either form.

    Args:
        boards: see :class:`StubBoard`.
        form: "0.0.0" or "1.5.0"; None: that of the binding that is installed.
        binding: folder with the package ``mbltml`` of that form, where it is not the installed one.
        **options: as of :class:`Stub`.

    Raises:
        BindingMissing: on entering, when there is no binding of that form.
    """

    variable = "LIGHTNING_NPU_STUB_MBLTML"
    not_supported = 4

    def __init__(
        self,
        boards: Sequence[StubBoard] = (StubBoard(sensors="npu"),),
        *,
        form: str | None = None,
        binding: str | Path | None = None,
        init_error: int = 0,
        call_s: float = 0.0,
    ):
        super().__init__(boards, init_error=init_error, call_s=call_s)
        self.form, self._binding = form, binding

    def _put_under(self) -> None:
        paths = [str(build.SHIM)]
        module = self._module(paths)
        assert self.form is not None
        path = build.library(f"mbltml-{self.form}")
        self.c = self._attach(path)
        self._stack.enter_context(mock.patch.object(module, "__file__", str(path.parent / "mbltml.py")))
        self._stack.enter_context(mock.patch.object(module, "_clib", None))
        self.env["LIGHTNING_NPU_STUB_MBLTML_FOLDER"] = str(path.parent)
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))

    def _module(self, paths: list[str]) -> ModuleType:
        """The binding in the form that is asked for, imported; what a child needs for it is added to ``paths``."""
        with _own_modules("mbltml"):
            found = _import("mbltml.mbltml")
            installed = _form(found) if found else None
        self.form = self.form or installed
        if self.form is None:
            raise BindingMissing("mbltml is not installed: pip install mobilint-ml")
        if self.form != installed:
            folder = Path(self._binding or Path(sys.prefix) / f"mbltml-{self.form}")
            name = "mobilint-ml" if self.form == "1.5.0" else "mbltml"
            self._stack.enter_context(_own_modules("mbltml"))
            self._stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
            importlib.invalidate_caches()
            found = _import("mbltml.mbltml")
            if found is None or _form(found) != self.form:
                command = f"pip install --no-deps --target {folder} {name}=={self.form}"
                raise BindingMissing(f"no mbltml of form {self.form} in {folder}: {command}")
            paths.append(str(folder))
        module = importlib.import_module("mbltml.mbltml")
        return module


@contextmanager
def no_nvml_library() -> Iterator[None]:
    """A machine without libnvidia-ml.so.1, for the pynvml of this process."""
    pynvml = importlib.import_module("pynvml")
    with _pynvml_state(pynvml, None), mock.patch.object(pynvml, "CDLL", side_effect=OSError("no such library")):
        yield


@contextmanager
def _pynvml_state(pynvml: ModuleType, library: ctypes.CDLL | None) -> Iterator[None]:
    with (
        mock.patch.object(pynvml, "nvmlLib", library),
        mock.patch.object(pynvml, "_nvmlLib_refcount", 0),
        mock.patch.object(pynvml, "_nvmlGetFunctionPointer_cache", {}),
    ):
        yield


@contextmanager
def _own_modules(package: str) -> Iterator[None]:
    """Imports of ``package`` start afresh within and are forgotten after; what was imported before comes back."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]

    before = {name: sys.modules.pop(name) for name in ours()}
    try:
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _form(module: ModuleType) -> str:
    return "1.5.0" if hasattr(module, "mbltmlGetTargetDeviceCount") else "0.0.0"


def _before(folder: Path, variable: str) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))
