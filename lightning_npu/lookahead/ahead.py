"""Asks frozen modules for the features of batches to come, and answers their calls from what was asked for."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_npu.balance import Balancer
from lightning_npu.errors import InputError, NPUError
from lightning_npu.lookahead.advice import Advice
from lightning_npu.lookahead.depth import Depth
from lightning_npu.lookahead.statistics import Statistics
from lightning_npu.lookahead.tags import Fetched, Request, Tag, Tags, edits
from lightning_npu.worker import Pending

if TYPE_CHECKING:
    from lightning_npu.device_calls import DeviceModule
    from lightning_npu.module import NPUFrozenModule

log = logging.getLogger(__name__)

_MARGIN = 1.25  # times vary: a batch that is late costs the training more than one that was not given

Inputs = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]]


class Ahead:
    """What one look-ahead knows: its modules, the tags of host and device tensors, and the counters.

    Args:
        modules: the frozen modules to ask ahead for.
        depth: how far.
        inputs: for modules that are fed what is computed from a batch: maps a batch, as the loader gives it, to the
            inputs of a module. See :class:`lightning_npu.Prefetch`.
        balancer: who encodes which batch; default: the device encodes all.
    """

    def __init__(
        self,
        modules: Mapping[str, NPUFrozenModule],
        depth: Depth,
        inputs: Inputs | None = None,
        balancer: Balancer | None = None,
    ) -> None:
        self.modules, self.depth = dict(modules), depth
        self.balancer = balancer or Balancer("off")
        if self.balancer.on:
            _require_reference(self.modules)
            self.depth.value = self.depth.most if self.depth.auto else self.depth.value
        self.inputs = _by_module(self.modules, inputs)
        self.host, self.device = Tags(), Tags()
        self.statistics = Statistics()
        self.current: Fetched | None = None
        self.kept: set[int] = set()
        self._numbers = 0
        self._alone = 0
        self._unfinished: list[Request] = []
        self._advice = Advice()
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

    def calibrate(self, steps: int) -> None:
        """Encode the next ``steps`` batches on the spot: training waits for the device and the device for training.

        In these steps each side can be timed by itself. It takes effect with the next batches that are fetched; one
        more is encoded so, in which the device begins to look ahead again. Nothing changes in what is computed.
        """
        if not self.balancer.on:
            self._alone = steps + 1

    @property
    def calibrating(self) -> bool:
        """Whether the present batch and the device have each other's time for themselves."""
        batch = self.current
        return batch is not None and batch.alone and any(ahead.alone for ahead, _ in batch.view.queue)

    def fetched(self, batch: Fetched) -> None:
        """A batch was read from a loader."""
        if not (batch.view.routes or self.inputs):
            return  # nothing is known yet about what feeds the modules
        self._numbers += 1
        if self._alone:
            self._alone -= 1
            batch.alone = True
        elif any(earlier.alone for earlier, _ in batch.view.queue):
            return  # asked for when those before it are through
        elif self.balancer.balance == "auto":
            batch.open = True
        elif self.balancer.picks(self._numbers - 1):
            self._ask(batch)
        else:
            batch.here = True

    def plan(self, queue: Sequence[Fetched], step_s: float) -> None:
        """Give the device, while it has room, the nearest batch that it can finish in time (``balance="auto"``).

        Args:
            queue: the batches to come, the next one first.
            step_s: seconds between two batches.
        """
        if self.balancer.balance != "auto":
            return
        self._unfinished = [request for request in self._unfinished if not request.pending.done()]
        room = 1 + sum(module.slots for module in self.modules.values()) - len(self._unfinished)
        for place, batch in enumerate(queue):
            if room <= 0:
                break
            if batch.open and _MARGIN * self._ends_s() <= max(place, 0.5) * step_s:
                self._ask(batch)
                room -= 1

    def deliver(self, batch: Fetched) -> None:
        """A batch leaves the loader: its tensors are tagged until they are moved to the device."""
        if batch.open:
            batch.open, batch.here = False, True
        if batch.alone and not any(later.alone for later, _ in batch.view.queue):
            for later, _ in batch.view.queue:
                self._ask(later)
        if self.balancer.on:
            self.balancer.count(here=batch.here)
        self.statistics.queue_depth = len(batch.view.queue)
        for leaf, tensor in enumerate(batch.found):
            self.host.put(tensor, batch, leaf)

    def _ask(self, batch: Fetched) -> None:
        """Ask for all that is known to be needed of a batch; what goes wrong here, the call itself will tell."""
        batch.open = False
        label = f"batch {batch.index} of the loader (counted from 0)"
        for name, module in self.modules.items():
            if module.failure is not None:
                continue  # its reference encodes on the spot
            if name in self.inputs and module.knows_inputs:
                made = module.request_made(functools.partial(self.inputs[name], batch.value), label)
                batch.requests.append(Request(module, None, made))
            for route in batch.view.routes.get(id(module), ()):
                try:
                    tensors = [batch.found[leaf] for leaf in route]
                    batch.requests.append(Request(module, route, module.request(tensors, label)))
                except (NPUError, IndexError):
                    log.debug("%s: not asked for ahead", label, exc_info=True)
        if self.balancer.balance == "auto":
            self._unfinished += batch.requests

    def _ends_s(self) -> float:
        """About how long until a batch would be ready if it were asked for now."""
        waits = sorted(request.module.remaining_s(request.pending) for request in self._unfinished)
        slots = sum(module.slots for module in self.modules.values())
        free_s = waits[len(waits) - slots] if len(waits) >= slots else 0.0  # until a slot is free
        return free_s + sum(module.batch_s for module in self.modules.values())

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

    def redeem(self, module: DeviceModule, tensors: Sequence[Tensor]) -> Pending | None:
        """What was requested for these very tensors, or None: then the call is a miss."""
        request, cause = self._find(module, tensors)
        if request is None:
            self.statistics.misses[cause] += 1
            self._advice.give(cause)
            return None
        self.statistics.hits += 1
        return request.pending

    def missed(self, cause: str) -> None:
        """A call was computed on the spot without being looked for."""
        self.statistics.misses[cause] += 1

    def encodes_here(self, module: NPUFrozenModule, tensors: Sequence[Tensor]) -> bool:
        """Whether the FP32 head in torch encodes these tensors: because their batch was kept, or would be late."""
        if not self.balancer.on:
            return False
        tags = [self.device.get(tensor) or self.host.get(tensor) for tensor in tensors]
        batch = next((tag.batch for tag in tags if tag is not None), self.current)
        if batch is None:
            return False
        if batch.here:
            self.statistics.balanced += 1
            return True
        mine = [request for request in batch.requests if request.module is module]
        late = len(mine) == 1 and self.balancer.encode_again(module.remaining_s(mine[0].pending))
        if late:
            batch.requests.remove(mine[0])
            mine[0].pending.cancel()
            self.statistics.balanced += 1
        return late

    def waited(self, seconds: float, idle_s: float, batch_bytes: int) -> None:
        """A requested batch was used, after waiting for it."""
        self.statistics.wait_s += seconds
        self.depth.bound(batch_bytes)
        self.depth.step(self.statistics.wait_s, idle_s, time.monotonic())

    def _find(self, module: DeviceModule, tensors: Sequence[Tensor]) -> tuple[Request | None, str]:
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
            cause = "calibration" if batch.alone else "beyond_reach"
            return None, "learning" if batch.view.learn(*call) else cause
        batch.requests.remove(request)
        edited = any(tag.passes != edits(tag.tensor) for tag in known) or not batch.unedited()
        if edited:
            request.pending.cancel()
            return None, "edited"
        return request, ""

    def _find_by_value(self, module: DeviceModule, tensors: Sequence[Tensor]) -> tuple[Request | None, str]:
        """Requests that ``inputs`` made hold what they were computed from; equal values have equal features."""
        if not any(self.modules[name] is module for name in self.inputs):
            return None, "not_a_batch_leaf"
        if self.current is None or not any(r.module is module and r.route is None for r in self.current.requests):
            alone = self.current is not None and self.current.alone
            return None, "calibration" if alone else "beyond_reach"
        for request in [r for r in self.current.requests if r.module is module and r.route is None]:
            try:
                made = request.pending.inputs()
            except Exception as error:
                self._advice.inputs_failed(error)
                self.current.requests.remove(request)
                return None, "inputs_failed"
            if len(made) == len(tensors) and all(map(module.same_input, made, tensors)):
                self.current.requests.remove(request)
                return request, ""
        return None, "differs"


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


def _require_reference(modules: Mapping[str, NPUFrozenModule]) -> None:
    without = [name for name, module in modules.items() if module.reference is None]
    if without:
        raise InputError(
            "balance needs the FP32 head in torch, and some frozen modules do not have it.",
            expected="a reference for each",
            got=f"none for {without}",
            remedy="offload(..., keep_reference=True), or NPUFrozenModule(..., reference=head)",
        )
