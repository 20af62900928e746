"""Nested Python values as flat tensors and back, by a description that is plain JSON: no class is ever imported."""

from __future__ import annotations

import keyword
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from lightning_npu.errors import ArtifactError, InputError

PRIMITIVES = (bool, int, float, str, type(None))


class Record(OrderedDict[str, Any]):
    """An output with named fields: ``out.field``, ``out["field"]`` and ``out[0]`` all work.

    Stands for dataclass-like outputs (such as those of Hugging Face models), whose class an artifact, being data,
    cannot bring along.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"output has no field '{name}'; it has {list(self)}") from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values, in order."""
        return tuple(self.values())


class Node:
    """One place of a structure. Final subclasses: Leaf, Constant, Items, Named."""

    def flatten(self, value: Any, where: str, tensors: list[Tensor]) -> None:
        """Append the tensors of ``value`` in order.

        Raises:
            InputError: ``value`` has another structure.
        """
        raise NotImplementedError

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value whose tensors these are."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The node as JSON-ready primitives."""
        raise NotImplementedError


class Leaf(Node):
    """A tensor, by its index among the flat ones."""

    def __init__(self, index: int) -> None:
        self.index = index

    def flatten(self, value: Any, where: str, tensors: list[Tensor]) -> None:
        """Take the tensor."""
        if not isinstance(value, Tensor):
            raise _mismatch(where, "a tensor", value)
        tensors.append(value)

    def build(self, tensors: Sequence[Tensor]) -> Tensor:
        """Give the tensor back."""
        return tensors[self.index]

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "tensor", "index": 0}``."""
        return {"kind": "tensor", "index": self.index}


class Constant(Node):
    """A value that was baked in: a primitive, or anything else by its repr."""

    def __init__(self, value: Any, *, opaque: bool = False, original: Any = None) -> None:
        self.value, self.opaque = value, opaque
        self.original = original if opaque else value

    def flatten(self, value: Any, where: str, tensors: list[Tensor]) -> None:
        """Take no tensor, but insist on the recorded value."""
        given = constant(value)
        if given.opaque != self.opaque or type(given.value) is not type(self.value) or given.value != self.value:
            held = self.value if self.opaque else repr(self.value)
            raise _mismatch(where, f"{_short(held)}, as when it was compiled", value)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Give the value; None for an opaque one that was read from a file."""
        return self.original

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "constant", "value": null}``."""
        return {"kind": "opaque" if self.opaque else "constant", "value": self.value}


class Items(Node):
    """A tuple or a list."""

    def __init__(self, kind: type[tuple[Any, ...]] | type[list[Any]], items: Sequence[Node]) -> None:
        self.kind, self.items = kind, tuple(items)

    def flatten(self, value: Any, where: str, tensors: list[Tensor]) -> None:
        """Flatten item by item; lists and tuples stand for each other."""
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            raise _mismatch(where, f"a {self.kind.__name__} of {len(self.items)} items", value)
        for index, (item, part) in enumerate(zip(self.items, value, strict=True)):
            item.flatten(part, f"{where}[{index}]", tensors)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Give the tuple or list."""
        built = [item.build(tensors) for item in self.items]
        return built if self.kind is list else tuple(built)

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "tuple", "items": [...]}``."""
        return {"kind": self.kind.__name__, "items": [item.to_json() for item in self.items]}


class Named(Node):
    """A dict, a named tuple, or a record (see :class:`Record`)."""

    def __init__(self, kind: str, keys: Sequence[Any], items: Sequence[Node], type_name: str = "") -> None:
        self.kind, self.keys, self.items, self.type_name = kind, tuple(keys), tuple(items), type_name
        self._make: Callable[..., Any] | None = None
        if kind == "namedtuple":  # names come from a file: namedtuple() itself refuses what is no identifier
            self._make = namedtuple(type_name, self.keys)  # type: ignore[misc]

    def flatten(self, value: Any, where: str, tensors: list[Tensor]) -> None:
        """Flatten field by field, in the recorded order."""
        parts = _named_parts(value)
        if parts is None or set(parts) != set(self.keys):
            raise _mismatch(where, f"a {self.kind} with {list(self.keys)}", value)
        for key, item in zip(self.keys, self.items, strict=True):
            item.flatten(parts[key], f"{where}[{key!r}]", tensors)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Give the dict, named tuple or record."""
        values = [item.build(tensors) for item in self.items]
        if self._make is not None:
            return self._make(*values)
        pairs = dict(zip(self.keys, values, strict=True))
        return Record(pairs) if self.kind == "record" else pairs

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "dict", "keys": [...], "items": [...]}``."""
        items = [item.to_json() for item in self.items]
        return {"kind": self.kind, "keys": list(self.keys), "items": items, "type": self.type_name}


def _named_parts(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def describe(value: Any, *, merge: bool = False) -> tuple[Node, list[Tensor]]:
    """The structure of ``value`` and its tensors in order.

    Args:
        value: tensors in tuples, lists, dicts, named tuples and dataclasses, among primitives.
        merge: give a tensor that occurs twice one index, so that it is returned twice by :meth:`Node.build`.
    """
    tensors: list[Tensor] = []
    seen: dict[int, int] = {}

    def visit(part: Any) -> Node:
        if isinstance(part, Tensor):
            if merge and id(part) in seen:
                return Leaf(seen[id(part)])
            seen[id(part)] = len(tensors)
            tensors.append(part)
            return Leaf(len(tensors) - 1)
        named = _named_parts(part)
        if named is not None:
            kind = (
                "namedtuple" if isinstance(part, tuple) else "dict" if type(part) in (dict, OrderedDict) else "record"
            )
            if kind == "record" and isinstance(part, Mapping):  # as Hugging Face's do, absent fields are left out
                named = {key: item for key, item in named.items() if item is not None}
            return Named(kind, list(named), [visit(item) for item in named.values()], type(part).__name__)
        if isinstance(part, (list, tuple)):
            return Items(list if isinstance(part, list) else tuple, [visit(item) for item in part])
        return constant(part)

    return visit(value), tensors


def constant(value: Any) -> Constant:
    """A value that is no tensor: a primitive as itself, anything else (enums, infinities) by its repr."""
    if isinstance(value, PRIMITIVES) and not isinstance(value, Enum):
        if type(value) not in PRIMITIVES:  # np.float64 is a float, and a file gives it back as one
            value = next(base(value) for base in (int, float, str) if isinstance(value, base))
        if not isinstance(value, float) or math.isfinite(value):  # JSON has no other numbers
            return Constant(value)
    return Constant(repr(value), opaque=True, original=value)


def node_from_json(data: Mapping[str, Any]) -> Node:
    """The inverse of :meth:`Node.to_json`.

    Raises:
        ArtifactError: an unknown kind, a missing entry, or keys that do not fit the items or cannot be names.
    """
    if not isinstance(data, Mapping):
        raise _damaged("A place of a structure is no node.", "an object with a kind", data)
    kind = data.get("kind")
    if kind == "tensor":
        index = data.get("index")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise _damaged("A tensor has no index.", "an integer from 0 on", index)
        return Leaf(index)
    if kind in ("constant", "opaque"):
        value = data.get("value", _ABSENT)
        if not isinstance(value, str if kind == "opaque" else PRIMITIVES):
            raise _damaged("A constant has no value.", "text" if kind == "opaque" else "a primitive", value)
        return Constant(value, opaque=kind == "opaque")
    if kind not in ("tuple", "list", "dict", "namedtuple", "record"):
        raise _damaged("A structure has an unknown kind.", "tensor, tuple, list, dict, ...", kind)
    if not isinstance(data.get("items"), list):
        raise _damaged(f"A {kind} has no items.", "a list of nodes", data.get("items"))
    items = [node_from_json(item) for item in data["items"]]
    if kind in ("tuple", "list"):
        return Items(list if kind == "list" else tuple, items)
    name, keys = data.get("type", ""), data.get("keys")
    if not isinstance(keys, list) or len(keys) != len(items):
        raise _damaged(f"A {kind} does not have one key per item.", f"{len(items)} keys", keys)
    if not all(isinstance(key, PRIMITIVES) for key in keys) or len(set(keys)) != len(keys):
        raise _damaged(f"The keys of a {kind} are not unique primitives.", "each key once", keys)
    names = [name, *keys] if kind == "namedtuple" else []
    if not all(isinstance(n, str) and n.isidentifier() and not keyword.iskeyword(n) for n in names):
        raise _damaged("A named tuple's names are no identifiers.", "names as in Python", names)
    if any(n.startswith("_") for n in names[1:]):
        raise _damaged("A named tuple has a field that starts with an underscore.", "public names", names[1:])
    return Named(kind, keys, items, name)


_ABSENT = object()


def _damaged(what: str, expected: str, got: object) -> ArtifactError:
    found = "nothing" if got is _ABSENT else repr(got)
    return ArtifactError(
        what,
        expected=expected,
        got=found if len(found) <= 200 else f"{found[:200]}...",
        remedy="the manifest is damaged: copy the artifact again, or compile the module again",
    )


def _mismatch(where: str, expected: str, value: Any) -> InputError:
    if isinstance(value, Tensor):
        got = f"a tensor of shape {list(value.shape)}"
    elif is_array(value):
        got = f"a {type(value).__name__} of shape {list(value.shape)} and dtype {value.dtype}: convert it to a tensor"
    elif isinstance(value, (list, tuple)):
        got = f"a {type(value).__name__} of {len(value)} items"
    elif isinstance(value, Mapping):
        got = f"a {type(value).__name__} with {list(value)}"
    else:
        got = _short(repr(value))
    return InputError(
        f"Argument {where} is not what the module was compiled for.",
        expected=expected,
        got=got,
        remedy="call it as when it was compiled, or compile it again with example inputs of this kind",
    )


def is_array(value: Any) -> bool:
    """Whether a value is an array of another library, such as NumPy's."""
    return not isinstance(value, Tensor) and hasattr(value, "dtype") and len(getattr(value, "shape", ())) > 0


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
