"""A loader seen from a little further ahead."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.lookahead.tags import Fetched, Route, leaves

if TYPE_CHECKING:
    from lightning_npu.lookahead.ahead import Ahead


class View:
    """A loader seen from a little further ahead. Everything but iteration is the loader's own.

    Args:
        loader: any iterable of batches.
        ahead: the look-ahead that it belongs to.
        reach: how many batches beyond the next one are worth fetching now; default: the depth.
    """

    def __init__(self, loader: Any, ahead: Ahead, *, reach: Callable[[View], int] | None = None) -> None:
        self.__dict__.update(
            loader=loader, ahead=ahead, reach=reach, live=True, routes={}, queue=deque(), number=0, position=None
        )

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # half-built, as in copy and pickle
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:  # Lightning sets worker_init_fn and _iterator: they belong to the loader
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.drop()
        return Stream(self, iter(self.loader))  # start the loader's workers now, as it would itself

    def learn(self, module: int, route: Route) -> bool:
        """Remember a route; whether it is new."""
        known = self.routes.setdefault(module, [])
        if route in known:
            return False
        known.append(route)
        return True

    def feeds(self, leaf: int) -> bool:
        """Whether a leaf is known to feed a frozen module."""
        return any(leaf in route for routes in self.routes.values() for route in routes)

    def drop(self) -> None:
        """Forget what was fetched ahead."""
        while self.queue:
            self.queue.popleft()[0].cancel()

    def retire(self) -> None:
        """Read no further ahead from now on; somebody may still hold this view."""
        self.drop()
        self.live = False
        self.routes.clear()


class StatefulView(View):
    """For loaders with a state: it tells the position of the batch that was delivered, not of the one fetched."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's state as of the last delivered batch."""
        state: dict[str, Any] = self.loader.state_dict() if self.position is None else self.position
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the loader."""
        self.position = None
        self.loader.load_state_dict(state)


def view_of(loader: Any, ahead: Ahead, *, reach: Callable[[View], int] | None = None) -> View:
    """The right view of a loader; a view of a view is made of the loader itself."""
    loader = loader.loader if isinstance(loader, View) else loader
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulView if stateful else View)(loader, ahead, reach=reach)


class Stream(Iterator[Any]):
    """One pass over a view."""

    def __init__(self, view: View, source: Iterator[Any]) -> None:
        self.view, self.source = view, source
        self.last: Fetched | None = None  # held for one batch: so long its memory cannot be handed out again
        self.steps_s: deque[float] = deque(maxlen=9)
        self.asked_at: float | None = None

    def __next__(self) -> Any:
        view = self.view
        now = time.monotonic()
        if self.asked_at is not None:
            self.steps_s.append(now - self.asked_at)
        self.asked_at = now
        while len(view.queue) < 1 + self._further():
            try:
                view.queue.append(self._fetch())
            except StopIteration:
                break
        if not view.queue:
            self.last = None
            raise StopIteration
        if self.steps_s:
            view.ahead.plan([batch for batch, _ in view.queue], sorted(self.steps_s)[len(self.steps_s) // 2])
        batch, view.position = view.queue.popleft()
        self.last = batch
        view.ahead.deliver(batch)
        value, batch.value = batch.value, None
        return value

    def _further(self) -> int:
        view = self.view
        if not view.live or not (view.routes or view.ahead.inputs):
            return 0
        depth: int = view.ahead.depth.value
        return max(0, depth if view.reach is None else min(depth, view.reach(view)))

    def _fetch(self) -> tuple[Fetched, Any]:
        view = self.view
        with torch.inference_mode(False), torch.no_grad():  # leaves must count their edits
            value = next(self.source)
            found = leaves(value) if view.live else []
            self._refuse_reused_memory(found)
            batch = Fetched(view, value, found, view.number)
            view.number += 1
            if view.live:
                view.ahead.fetched(batch)
            position = view.loader.state_dict() if isinstance(view, StatefulView) else None
        return batch, position

    def _refuse_reused_memory(self, found: list[Tensor]) -> None:
        """A loader that fills the same memory for every batch must not be read ahead."""
        here = {tensor.data_ptr(): tensor for tensor in found if tensor.numel()}
        for batch, _ in self.view.queue:
            for tensor in batch.found:
                if here.get(tensor.data_ptr(), tensor) is not tensor or not batch.unedited():
                    raise InputError(
                        "The loader overwrote a batch that was fetched ahead.",
                        expected="a loader that gives every batch memory of its own",
                        remedy="use Prefetch(depth=0), or copy in the loader's collate function",
                    )
        if self.last is not None and any(tensor.data_ptr() in here for tensor in self.last.found):
            self.view.live = False  # what is in the queue is whole and still to be delivered
            self.view.routes.clear()
            warnings.warn(
                "Reading ahead is off for this loader: it uses the memory of a batch again for the next one.",
                stacklevel=3,
            )
