"""Vendors' libraries: opened once per process, again in a forked one, and again after a driver was reloaded."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.retry import Backoff


class Failure(Exception):
    """A call of a vendor's library failed.

    Attributes:
        code: the library's status code; below 0: it did not come from there.
        text: what it says.
        library: its name.
    """

    def __init__(self, code: int, text: str, library: str) -> None:
        super().__init__(code, text, library)
        self.code, self.text, self.library = code, text, library

    def __str__(self) -> str:
        text = self.text.rstrip(".").lower()
        return f"{text} ({self.library} {self.code})" if self.code >= 0 else text


class DriverLibrary(ABC):
    """A vendor's library in this process, shared by all sources in it.

    Attributes:
        lock: held while it is opened and closed.
        generation: changes whenever handles to boards become invalid.
        last_success_s: when a reading of any board last succeeded, which its reader notes here.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget everything, as in a process that was just forked: handles and locks of the parent mean nothing.

        What the parent opened is not shut down from here: the driver may take that for the parent's wish.
        """
        self.lock = threading.RLock()
        self.generation += 1
        self.last_success_s = 0.0
        self._module: ModuleType | None = None
        self._users: set[int] = set()

    def open(self, user: int) -> None:
        """Start the library unless it is.

        Args:
            user: whoever must :meth:`close` it, by a number of its own.

        Raises:
            PowerUnavailableError: no binding, library or driver, or no permission.
        """
        with self.lock:
            if self._module is None:
                module = self._load()
                try:
                    self._start(module)
                except Failure as failure:
                    raise self._unavailable(failure) from failure
                self._module = module
                self.generation += 1
            self._users.add(user)

    def close(self, user: int) -> None:
        """Shut the library down unless others use it."""
        with self.lock:
            self._users.discard(user)
            if self._module is not None and not self._users:
                self._stop(self._module)
                self._module = None

    def reopen(self, seen: int) -> None:
        """Shut down and start again, unless somebody did since ``seen``.

        Raises:
            Failure: it cannot be started now.
        """
        with self.lock:
            if self._module is not None and self.generation == seen:
                self.generation += 1
                self._stop(self._module)
                self._start(self._module)

    @abstractmethod
    def _load(self) -> ModuleType:
        """Import the vendor's binding; raises PowerUnavailableError."""

    @abstractmethod
    def _start(self, module: ModuleType) -> None:
        """Initialise; raises Failure."""

    @abstractmethod
    def _stop(self, module: ModuleType) -> None:
        """Shut down; never raises."""

    @abstractmethod
    def _unavailable(self, failure: Failure) -> PowerUnavailableError:
        """What to tell the user when the library does not start."""


class Access:
    """The way to one board: its handle, looked up again where the board was lost or the handle is another process's.

    A board that fails is looked for at once, then after 1, 2, 4 ... 30 s. If no board can be read, the whole library
    is started again, as after the driver was reloaded.

    Args:
        library: the vendor's library.
        user: who opens it.
        look_up: finds the handle by the board's identity; raises Failure.
    """

    def __init__(self, library: DriverLibrary, user: int, look_up: Callable[[], Any]) -> None:
        self._library, self._user, self._look_up = library, user, look_up
        self._handle: Any = None
        self._generation = -1
        self._failing_since_s: float | None = None
        self._backoff = Backoff()

    def handle(self) -> Any:
        """The handle.

        Raises:
            Failure: the board is not there now, or the library cannot be started.
            PowerUnavailableError: the library cannot be opened in this process.
        """
        library = self._library
        if self._handle is not None and self._generation == library.generation and self._failing_since_s is None:
            return self._handle
        # whoever reads a broken board, perhaps the training loop, must not wait for another thread's attempt to mend it
        if not library.lock.acquire(blocking=self._failing_since_s is None):
            raise Failure(-1, "being looked for by another thread", "")
        try:
            return self._renewed()
        finally:
            library.lock.release()

    def _renewed(self) -> Any:
        library = self._library
        library.open(self._user)
        if self._failing_since_s is not None and self._backoff.ready():
            self._backoff.failed()  # until a reading succeeds
            self._handle = None
            if library.last_success_s < self._failing_since_s:  # it is not this board alone
                try:
                    library.reopen(self._generation)
                finally:
                    self._generation = library.generation
        if self._handle is None or self._generation != library.generation:
            self._generation = library.generation
            self._handle = None
            try:
                self._handle = self._look_up()
            except Failure:
                self.note(failed=True)
                raise
        return self._handle

    def note(self, *, failed: bool) -> None:
        """Say whether a reading failed altogether."""
        now = time.monotonic()
        if not failed:
            self._library.last_success_s = now
            if self._failing_since_s is not None:
                self._failing_since_s = None
                self._backoff.succeeded()
        elif self._failing_since_s is None:
            self._failing_since_s = now
