"""When to try again to open a library that failed."""

from __future__ import annotations

import time

LONGEST_S = 30.0


class Backoff:
    """Allows the first attempt after a failure at once, the next ones after 1, 2, 4 ... 30 s."""

    def __init__(self) -> None:
        self._wait_s, self._not_before_s = 0.0, 0.0

    def ready(self) -> bool:
        """Whether an attempt may be made now."""
        return time.monotonic() >= self._not_before_s

    def failed(self) -> None:
        """An attempt was made in vain."""
        self._wait_s = min(LONGEST_S, max(1.0, 2 * self._wait_s))
        self._not_before_s = time.monotonic() + self._wait_s

    def succeeded(self) -> None:
        """What failed works again."""
        self._wait_s, self._not_before_s = 0.0, 0.0
