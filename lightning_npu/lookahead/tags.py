"""Which tensor is which leaf of which batch, and whether it was edited since."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_npu.worker import Pending

if TYPE_CHECKING:
    from lightning_npu.lookahead.view import View
    from lightning_npu.module import NPUFrozenModule

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

    __slots__ = ("alone", "answered", "found", "here", "index", "open", "passes", "requests", "value", "view")

    def __init__(self, view: View, value: Any, found: list[Tensor], index: int) -> None:
        self.view, self.value, self.found, self.index = view, value, found, index
        self.passes = [edits(tensor) for tensor in found]
        self.requests: list[Request] = []
        self.here = False  # to be encoded by the FP32 head in torch
        self.alone = False  # to be encoded on the spot, so that device and training can be timed each by itself
        self.open = False  # it is not decided yet who encodes it
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
