"""Reads a loader ahead and asks for features before they are needed; knows no Lightning.

Every tensor of a fetched batch carries a tag: which batch it belongs to and which leaf of it it is. The first call of
a frozen module shows by its tags which leaves feed it (its *route*); from then on these leaves are submitted when a
batch is fetched, and a later call with the very same tensors, unedited, is answered from what was requested. Anything
else is computed on the spot: slower, never wrong.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_npu.errors import InputError, NPUError
from lightning_npu.worker import Pending

if TYPE_CHECKING:
    from lightning_npu.module import NPUFrozenModule

log = logging.getLogger(__name__)

Inputs = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]]
Route = tuple[int, ...]  # indices of the batch leaves that feed one call of a module, in the order of its inputs


def leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch in a fixed order, for every container that Lightning can move to a device."""
    found: list[Tensor] = []

    def visit(part: Any) -> None:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, Mapping):
            for value in part.values():
                visit(value)
        elif isinstance(part, (list, tuple)):
            for value in part:
                visit(value)
        elif is_dataclass(part) and not isinstance(part, type):
            for entry in fields(part):
                visit(getattr(part, entry.name))

    visit(batch)
    return found


def replace_leaves(batch: Any, by_index: Mapping[int, Tensor]) -> Any:
    """The batch with some of its tensors replaced, counted as :func:`leaves` counts; containers are copied."""
    if not by_index:
        return batch
    counter = iter(range(1 << 62))

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            return by_index.get(next(counter), part)
        if isinstance(part, Mapping):
            twin: Any = copy.copy(part)
            for key, value in part.items():
                twin[key] = visit(value)
            return twin
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(visit(value) for value in part))
        if isinstance(part, (list, tuple)):
            return type(part)(visit(value) for value in part)
        if is_dataclass(part) and not isinstance(part, type):
            twin = copy.copy(part)
            for entry in fields(part):
                object.__setattr__(twin, entry.name, visit(getattr(part, entry.name)))
            return twin
        return part

    return visit(batch)


def edits(tensor: Tensor) -> int:
    """In-place edits of a tensor so far; inference tensors do not count theirs, and give -1."""
    return -1 if tensor.is_inference() else tensor._version


class Fetched:
    """A batch that was fetched, with what was requested for it."""

    __slots__ = ("answered", "found", "index", "passes", "requests", "view")

    def __init__(self, view: View, found: list[Tensor], index: int) -> None:
        self.view, self.found, self.index = view, found, index
        self.passes = [edits(tensor) for tensor in found]
        self.requests: list[Request] = []
        self.answered: set[tuple[int, Route]] = set()  # calls so far, by module and route

    def unedited(self) -> bool:
        """Whether no leaf was edited since the batch was fetched."""
        return all(edits(tensor) == count for tensor, count in zip(self.found, self.passes, strict=True))

    def cancel(self) -> None:
        """Drop what was requested and not used."""
        for request in self.requests:
            request.pending.cancel()
        self.requests.clear()


@dataclass(eq=False)
class Request:
    """Features that were asked for ahead of time.

    Attributes:
        module: the module that will need them.
        route: the leaves that feed it; None for a request that came from ``inputs`` and is recognised by value.
        pending: the features to come.
    """

    module: NPUFrozenModule
    route: Route | None
    pending: Pending


@dataclass(frozen=True)
class Tag:
    """What is known of one tensor: it is leaf ``leaf`` of ``batch``, and was edited ``passes`` times when tagged."""

    tensor: Tensor  # held, so that its id is not used again while the tag lives
    passes: int
    batch: Fetched
    leaf: int


class Tags:
    """Tags by tensor identity."""

    def __init__(self) -> None:
        self._tags: dict[int, Tag] = {}

    def put(self, tensor: Tensor, batch: Fetched, leaf: int) -> None:
        """Tag a tensor."""
        self._tags[id(tensor)] = Tag(tensor, edits(tensor), batch, leaf)

    def get(self, tensor: Tensor) -> Tag | None:
        """The tensor's tag, also if it was edited since."""
        return self._tags.get(id(tensor))

    def pop(self, tensor: Tensor) -> Tag | None:
        """The tensor's tag, forgotten from now on; None if it was edited since."""
        tag = self._tags.pop(id(tensor), None)
        return tag if tag is not None and tag.passes == edits(tensor) else None

    def clear(self) -> None:
        """Forget all."""
        self._tags.clear()


@dataclass
class Statistics:
    """Counters of a look-ahead.

    Attributes:
        hits: calls answered from a request.
        misses: calls computed on the spot, by cause: "learning" (the call that taught a route), "not_a_batch_leaf",
            "edited", "asked_twice", "beyond_reach" (known, but not requested for this batch), "differs" (``inputs``
            gave something else than what was passed), "inputs_failed".
        wait_s: seconds that calls waited for requested features.
        queue_depth: batches that were asked for and not used yet, when the last batch was delivered.
    """

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    wait_s: float = 0.0
    queue_depth: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over calls; 0 before the first."""
        calls = self.hits + sum(self.misses.values())
        return self.hits / calls if calls else 0.0


class Ahead:
    """What one look-ahead knows: its modules, the tags of host and device tensors, and the counters.

    Args:
        modules: the frozen modules to ask ahead for.
        depth: how far.
        inputs: for modules that are fed what is computed from a batch: maps a batch, as the loader gives it, to the
            inputs of a module. See :class:`lightning_npu.Prefetch`.
    """

    def __init__(self, modules: Mapping[str, NPUFrozenModule], depth: Depth, inputs: Inputs | None = None) -> None:
        self.modules, self.depth = dict(modules), depth
        self.inputs = _by_module(self.modules, inputs)
        self.host, self.device = Tags(), Tags()
        self.statistics = Statistics()
        self.current: Fetched | None = None
        self.kept: set[int] = set()
        self._warned: set[str] = set()
        for module in self.modules.values():
            module.attach(self)

    def detach(self) -> None:
        """Leave the modules as they were."""
        for module in self.modules.values():
            module.attach(None)
        self.host.clear()
        self.device.clear()
        self.current = None

    # ---- asking

    def request(self, batch: Fetched, value: Any) -> None:
        """Ask for all that is known to be needed of a batch; what goes wrong here, the call itself will tell."""
        for name, module in self.modules.items():
            label = f"batch {batch.index} of the loader (counted from 0)"
            if name in self.inputs and module.knows_inputs:
                made = module.request_made(functools.partial(self.inputs[name], value), label)
                batch.requests.append(Request(module, None, made))
            for route in batch.view.routes.get(id(module), ()):
                try:
                    tensors = [batch.found[leaf] for leaf in route]
                    batch.requests.append(Request(module, route, module.request(tensors, label)))
                except (NPUError, IndexError):
                    log.debug("%s: not asked for ahead", label, exc_info=True)

    def deliver(self, batch: Fetched) -> None:
        """A batch leaves the loader: its tensors are tagged until they are moved to the device."""
        self.statistics.queue_depth = len(batch.view.queue)
        for leaf, tensor in enumerate(batch.found):
            self.host.put(tensor, batch, leaf)

    def moved(self, before: Sequence[Tag | None], after: Sequence[Tensor], to: Tags) -> None:
        """Tag what became of tagged tensors, where it is an image of them."""
        for tag, tensor in zip(before, after, strict=True):
            if tag is not None and tensor.shape == tag.tensor.shape:
                to.put(tensor, tag.batch, tag.leaf)
                self.current = tag.batch

    def keeps_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor was left on the host on purpose (see ``drop_inputs``)."""
        return id(tensor) in self.kept

    # ---- answering

    def redeem(self, module: NPUFrozenModule, tensors: Sequence[Tensor]) -> Pending | None:
        """What was requested for these very tensors, or None: then the call is a miss."""
        request, cause = self._find(module, tensors)
        if request is None:
            self.statistics.misses[cause] += 1
            self._advise(cause)
            return None
        self.statistics.hits += 1
        return request.pending

    def waited(self, seconds: float, idle_s: float, batch_bytes: int) -> None:
        """A requested batch was used, after waiting for it."""
        self.statistics.wait_s += seconds
        self.depth.bound(batch_bytes)
        self.depth.step(self.statistics.wait_s, idle_s, time.monotonic())

    def _find(self, module: NPUFrozenModule, tensors: Sequence[Tensor]) -> tuple[Request | None, str]:
        tags = [self.device.get(tensor) or self.host.get(tensor) for tensor in tensors]
        known = [tag for tag in tags if tag is not None]
        if len(known) < len(tags) or len({id(tag.batch) for tag in known}) != 1:
            return self._find_by_value(module, tensors)
        batch, route = known[0].batch, tuple(tag.leaf for tag in known)
        call = (id(module), route)
        if call in batch.answered:  # the result of the first call is the caller's, who may have edited it
            return None, "asked_twice"
        batch.answered.add(call)
        request = next((r for r in batch.requests if r.module is module and r.route == route), None)
        if request is None:
            return None, "learning" if batch.view.learn(*call) else "beyond_reach"
        batch.requests.remove(request)
        edited = any(tag.passes != edits(tag.tensor) for tag in known) or not batch.unedited()
        if edited:
            request.pending.cancel()
            return None, "edited"
        return request, ""

    def _find_by_value(self, module: NPUFrozenModule, tensors: Sequence[Tensor]) -> tuple[Request | None, str]:
        """Requests that ``inputs`` made hold what they were computed from; equal values have equal features."""
        if not any(self.modules[name] is module for name in self.inputs):
            return None, "not_a_batch_leaf"
        if self.current is None or not any(r.module is module and r.route is None for r in self.current.requests):
            return None, "beyond_reach"
        for request in [r for r in self.current.requests if r.module is module and r.route is None]:
            try:
                made = request.pending.inputs()
            except Exception as error:
                log.warning("inputs(batch) failed, so nothing was asked for ahead: %r", error)
                self.current.requests.remove(request)
                return None, "inputs_failed"
            if len(made) == len(tensors) and all(map(module.same_input, made, tensors)):
                self.current.requests.remove(request)
                return request, ""
        return None, "differs"

    def _advise(self, cause: str) -> None:
        advice = _ADVICE.get(cause)
        if advice is None or cause in self._warned:
            return
        self._warned.add(cause)
        warnings.warn(f"{advice} Until then these batches are encoded on the spot: slower, never wrong.", stacklevel=5)


_ADVICE = {
    "not_a_batch_leaf": (
        "An NPUFrozenModule is fed a tensor that is no tensor of the batch, so its features cannot be asked for ahead "
        "of time. Compute it in the dataset or collate function, or say how it is made from the batch: "
        "Prefetch(inputs=...) or a method npu_inputs(batch) of the LightningModule."
    ),
    "edited": (
        "A batch tensor was edited in place between loading and the call of an NPUFrozenModule, so what was asked for "
        "ahead of time is not used. Edit it in the dataset, or out of place."
    ),
    "inputs_failed": (
        "The function that says what an NPUFrozenModule is fed (Prefetch(inputs=...)) failed; see the log."
    ),
    "differs": (
        "What inputs(batch) gave differs from what the training step passed to the NPUFrozenModule. Make both the same "
        "computation, without randomness."
    ),
}


class Depth:
    """How many batches to ask for ahead: a number, or "auto".

    "auto" starts at 2. If within 16 batches the training waited for the device *and* the device waited for the
    training, a longer queue would have spared both, and it grows by one. It never exceeds ``most``, nor what fits into
    ``memory_bytes``: each batch ahead holds its own tensors and its features.

    Args:
        depth: "auto" or a number of batches from 0 on.
        most: the largest depth that "auto" takes.
        memory_bytes: what the batches ahead may hold in all under "auto"; default 1 GiB.
    """

    def __init__(self, depth: int | str = "auto", *, most: int = 8, memory_bytes: int = 1 << 30) -> None:
        if depth != "auto" and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
            raise InputError("depth is wrong.", expected="'auto', or a number of batches from 0 on", got=repr(depth))
        self.auto = depth == "auto"
        self.value = 2 if isinstance(depth, str) else depth
        self.most, self.memory_bytes = most, memory_bytes
        self._batches, self._wait_s, self._idle_s, self._since = 0, 0.0, 0.0, 0.0

    def bound(self, batch_bytes: int) -> None:
        """Keep "auto" within its memory, for batches of this size (tensors and features)."""
        if self.auto:
            self.value = max(1, min(self.value, self.memory_bytes // max(1, batch_bytes)))
            self.most = max(1, min(self.most, self.memory_bytes // max(1, batch_bytes)))

    def step(self, wait_s: float, idle_s: float, now: float) -> None:
        """One batch was used.

        Args:
            wait_s: seconds that training has waited for features so far.
            idle_s: seconds that the devices have waited for work so far.
            now: monotonic time in seconds.
        """
        if not self.auto:
            return
        self._batches += 1
        if self._batches % 16 == 1:
            self._wait_s, self._idle_s, self._since = wait_s, idle_s, now
        elif self._batches % 16 == 0 and self.value < self.most:
            least = 0.005 * (now - self._since)
            if wait_s - self._wait_s > least and idle_s - self._idle_s > least:
                self.value += 1


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
            self.queue.popleft().batch.cancel()

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


class _Queued(NamedTuple):
    value: Any
    batch: Fetched
    position: Any


class Stream(Iterator[Any]):
    """One pass over a view."""

    def __init__(self, view: View, source: Iterator[Any]) -> None:
        self.view, self.source = view, source
        self.last: Fetched | None = None  # held for one batch: so long its memory cannot be handed out again

    def __next__(self) -> Any:
        view = self.view
        while len(view.queue) < 1 + self._further():
            try:
                view.queue.append(self._fetch())
            except StopIteration:
                break
        if not view.queue:
            self.last = None
            raise StopIteration
        value, batch, view.position = view.queue.popleft()
        self.last = batch
        view.ahead.deliver(batch)
        return value

    def _further(self) -> int:
        view = self.view
        if not view.live or not (view.routes or view.ahead.inputs):
            return 0
        depth: int = view.ahead.depth.value
        return max(0, depth if view.reach is None else min(depth, view.reach(view)))

    def _fetch(self) -> _Queued:
        view = self.view
        with torch.inference_mode(False), torch.no_grad():  # leaves must count their edits
            value = next(self.source)
            found = leaves(value) if view.live else []
            self._refuse_reused_memory(found)
            batch = Fetched(view, found, view.number)
            view.number += 1
            if view.live:
                view.ahead.request(batch, value)
            position = view.loader.state_dict() if isinstance(view, StatefulView) else None
        return _Queued(value, batch, position)

    def _refuse_reused_memory(self, found: list[Tensor]) -> None:
        """A loader that fills the same memory for every batch must not be read ahead."""
        here = {tensor.data_ptr(): tensor for tensor in found if tensor.numel()}
        for _, batch, _ in self.view.queue:
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


def _by_module(modules: Mapping[str, NPUFrozenModule], inputs: Inputs | None) -> dict[str, Callable[[Any], Any]]:
    if inputs is None:
        return {}
    if callable(inputs):
        if len(modules) != 1:
            raise InputError(
                "inputs is one function, but the model has not one frozen module.",
                expected="a mapping from a module's name to a function of the batch",
                got=f"modules {list(modules)}",
                remedy="pass inputs={'encoder': function, ...}",
            )
        return {next(iter(modules)): inputs}
    unknown = sorted(set(inputs) - set(modules))
    if unknown:
        raise InputError(
            "inputs names modules that are not frozen modules of the model.",
            expected=f"names of {list(modules)}",
            got=unknown,
        )
    return dict(inputs)
