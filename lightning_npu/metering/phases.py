"""Which phase a run was in, and when: spans that cover its whole time without overlap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of time in one phase.

    Attributes:
        phase: one of :data:`lightning_npu.keys.PHASES`.
        start_s: monotonic.
        end_s: monotonic.
    """

    phase: str
    start_s: float
    end_s: float


class Phases:
    """Keeps the present phase and the spans of the past ones.

    Spans queue up until :meth:`take` removes those whose energy is known. A phase that is entered inside another one
    (a checkpoint written in a validation) interrupts it. What never comes to be taken is bounded: beyond ``limit``
    spans, neighbours that are the oldest are merged into the phase of the longer one.

    Args:
        clock: monotonic seconds.
        limit: spans that may wait.
        start_s: when the first phase began; None: now.

    Attributes:
        seconds: of each phase that has ended, all together.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, limit: int = 1 << 16, start_s: float | None = None
    ) -> None:
        self._clock, self._limit = clock, limit
        self._stack = ["other"]
        self._since_s = clock() if start_s is None else start_s
        self._spans: deque[Span] = deque()
        self.seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """The phase of this moment."""
        return self._stack[-1]

    def switch(self, phase: str) -> float:
        """Leave the present phase for ``phase``; the moment."""
        now_s = self._close()
        self._stack[-1] = phase
        return now_s

    def enter(self, phase: str) -> float:
        """Interrupt the present phase by ``phase``; the moment."""
        now_s = self._close()
        self._stack.append(phase)
        return now_s

    def leave(self) -> float:
        """Go back to the phase that was interrupted; the moment."""
        now_s = self._close()
        if len(self._stack) > 1:
            self._stack.pop()
        return now_s

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """``phase`` inside of the block."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def stop(self, at_s: float) -> None:
        """Close the present span at that moment, and forget interrupted phases."""
        self._close(at_s)
        self._stack = ["other"]

    def take(self, until_s: float) -> list[Span]:
        """Remove and give what lies before ``until_s``; a span across it is divided."""
        taken: list[Span] = []
        while self._spans and self._spans[0].start_s < until_s:
            span = self._spans.popleft()
            if span.end_s > until_s:
                self._spans.appendleft(Span(span.phase, until_s, span.end_s))
                span = Span(span.phase, span.start_s, until_s)
            taken.append(span)
        return taken

    def put_back(self, spans: Sequence[Span]) -> None:
        """Let spans that were just taken wait on."""
        self._spans.extendleft(reversed(spans))

    @property
    def waiting_since_s(self) -> float:
        """Where what was not taken yet begins."""
        return self._spans[0].start_s if self._spans else self._since_s

    def waiting(self) -> tuple[Span, ...]:
        """The spans that were not taken yet, the present one up to this moment among them."""
        return (*self._spans, Span(self._stack[-1], self._since_s, max(self._since_s, self._clock())))

    def _close(self, at_s: float | None = None) -> float:
        now_s = self._clock() if at_s is None else at_s
        phase = self._stack[-1]
        if now_s > self._since_s:
            self._add(Span(phase, self._since_s, now_s))
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._since_s
            self._since_s = now_s
        return now_s

    def _add(self, span: Span) -> None:
        if self._spans and self._spans[-1].phase == span.phase and self._spans[-1].end_s == span.start_s:
            span = Span(span.phase, self._spans.pop().start_s, span.end_s)
        self._spans.append(span)
        if len(self._spans) > self._limit:
            first, second = self._spans.popleft(), self._spans.popleft()
            longer = max(first, second, key=lambda s: s.end_s - s.start_s)
            self._spans.appendleft(Span(longer.phase, first.start_s, second.end_s))


def bundle(spans: Iterable[Span], phases: Collection[str], longest_s: float) -> Iterator[list[Span]]:
    """Put neighbours together that are too short for any sensor: up to ``longest_s`` from the first to the last.

    Args:
        spans: in order of time.
        phases: those whose spans may be put together.
        longest_s: seconds.
    """
    bundled: list[Span] = []
    for span in spans:
        fits = bundled and bundled[-1].phase in phases and span.phase in phases
        if bundled and not (fits and span.end_s - bundled[0].start_s <= longest_s):
            yield bundled
            bundled = []
        bundled.append(span)
    if bundled:
        yield bundled
