"""Nested Python values as flat tensors and back, by a description that is plain JSON: no class is ever imported."""

from __future__ import annotations

import inspect
import keyword
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from lightning_npu.errors import ArtifactError, InputError

_PRIMITIVES = (bool, int, float, str, type(None))


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
        same = repr(value) == self.value if self.opaque else type(value) is type(self.value) and value == self.value
        if not same:
            raise _mismatch(where, f"{self.value!r}, as when it was compiled" if not self.opaque else self.value, value)

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
        if isinstance(part, _PRIMITIVES):
            return Constant(part)
        named = _named_parts(part)
        if named is not None:
            kind = (
                "namedtuple" if isinstance(part, tuple) else "dict" if type(part) in (dict, OrderedDict) else "record"
            )
            if kind == "record":  # as such classes do themselves, absent fields are left out
                named = {key: item for key, item in named.items() if item is not None}
            return Named(kind, list(named), [visit(item) for item in named.values()], type(part).__name__)
        if isinstance(part, (list, tuple)):
            return Items(list if isinstance(part, list) else tuple, [visit(item) for item in part])
        return Constant(repr(part), opaque=True, original=part)

    return visit(value), tensors


def node_from_json(data: Mapping[str, Any]) -> Node:
    """The inverse of :meth:`Node.to_json`.

    Raises:
        ArtifactError: an unknown kind, or names that cannot be names.
    """
    kind = data["kind"]
    if kind == "tensor":
        return Leaf(int(data["index"]))
    if kind in ("constant", "opaque"):
        return Constant(data["value"], opaque=kind == "opaque")
    items = [node_from_json(item) for item in data.get("items", ())]
    if kind in ("tuple", "list"):
        return Items(list if kind == "list" else tuple, items)
    if kind in ("dict", "namedtuple", "record"):
        name, keys = data.get("type", ""), data["keys"]
        if kind == "namedtuple" and not all(str(n).isidentifier() and not keyword.iskeyword(n) for n in (name, *keys)):
            raise ArtifactError("A named tuple's names are no identifiers.", got=[name, *keys])
        return Named(kind, keys, items, name)
    raise ArtifactError("A structure has an unknown kind.", expected="tensor, tuple, list, dict, ...", got=kind)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the replaced module's ``forward`` and what it held when the module was compiled."""

    name: str
    kind: str  # "positional", "keyword", "var_positional", "var_keyword"
    node: Node
    default: Node | None  # None: required


class CallSignature:
    """How the replaced module is called: maps ``*args, **kwargs`` to flat tensors."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        # what may be left out in a call: the default is what was compiled
        self._optional = {
            p.name for p in self.parameters if p.default is not None and p.default.to_json() == p.node.to_json()
        }

    @classmethod
    def record(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallSignature, list[Tensor]]:
        """Describe one call of ``forward``.

        Raises:
            InputError: the arguments do not fit the signature.
        """
        signature = inspect.signature(forward)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                f"The example inputs do not fit the module's forward: {error}.",
                expected=f"forward{signature}",
                got=f"{len(args)} positional, keywords {sorted(kwargs)}",
                remedy="give the inputs as the module's caller does",
            ) from error
        bound.apply_defaults()
        _, tensors = describe(tuple(bound.arguments.values()))
        parameters, offset = [], 0
        for name, parameter in signature.parameters.items():
            node, found = describe(bound.arguments[name])
            _shift(node, offset)
            offset += len(found)
            has_default = parameter.default is not inspect.Parameter.empty
            default = describe(parameter.default)[0] if has_default else None
            parameters.append(Parameter(name, _KINDS[parameter.kind], node, default))
        return cls(parameters), tensors

    @classmethod
    def positional(cls, names: Sequence[str]) -> CallSignature:
        """One required positional tensor per name."""
        return cls([Parameter(name, "positional", Leaf(index), None) for index, name in enumerate(names)])

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The call whose tensors these are: the inverse of :meth:`flatten`."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self.parameters:
            value = parameter.node.build(tensors)
            if parameter.kind == "positional":
                args.append(value)
            elif parameter.kind == "var_positional":
                args.extend(value)
            elif parameter.kind == "keyword":
                kwargs[parameter.name] = value
            else:
                kwargs.update(value)
        return args, kwargs

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of one call.

        Raises:
            InputError: the call has other arguments than the module was compiled for.
        """
        tensors: list[Tensor] = []
        rest, given = list(args), dict(kwargs)
        for parameter in self.parameters:
            name = parameter.name
            if parameter.kind == "var_positional":
                parameter.node.flatten(tuple(rest), f"*{name}", tensors)
                rest = []
            elif parameter.kind == "var_keyword":
                parameter.node.flatten(given, f"**{name}", tensors)
                given = {}
            elif parameter.kind == "positional" and rest:
                parameter.node.flatten(rest.pop(0), f"'{name}'", tensors)
            elif name in given:
                parameter.node.flatten(given.pop(name), f"'{name}'", tensors)
            elif name not in self._optional:
                raise InputError(
                    f"Argument '{name}' is missing.",
                    expected=self.describe(),
                    remedy="pass it as when the module was compiled",
                )
        if rest or given:
            raise InputError(
                "There are too many arguments.",
                expected=self.describe(),
                got=f"{len(args)} positional, keywords {sorted(kwargs)}",
                remedy="pass the arguments of the original module",
            )
        return tensors

    def tensor_names(self) -> list[str]:
        """A readable name per flat tensor: the parameter's, with its place inside where it is nested."""
        names: list[str] = []
        for parameter in self.parameters:
            names.extend(leaf_names(parameter.node, parameter.name))
        return names

    def describe(self) -> str:
        """The parameters for people: ``forward(images, mask=None)``."""
        parts = []
        for parameter in self.parameters:
            star = {"var_positional": "*", "var_keyword": "**"}.get(parameter.kind, "")
            held = parameter.node.value if isinstance(parameter.node, Constant) else ""
            parts.append(f"{star}{parameter.name}" + (f"={held!r}" if isinstance(parameter.node, Constant) else ""))
        return f"forward({', '.join(parts)})"

    def to_json(self) -> list[dict[str, Any]]:
        """The parameters as JSON-ready primitives."""
        return [
            {
                "name": parameter.name,
                "kind": parameter.kind,
                "value": parameter.node.to_json(),
                "default": None if parameter.default is None else parameter.default.to_json(),
            }
            for parameter in self.parameters
        ]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> CallSignature:
        """The inverse of :meth:`to_json`."""
        return cls(
            [
                Parameter(
                    entry["name"],
                    entry["kind"],
                    node_from_json(entry["value"]),
                    None if entry["default"] is None else node_from_json(entry["default"]),
                )
                for entry in data
            ]
        )


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "var_positional",
    inspect.Parameter.VAR_KEYWORD: "var_keyword",
}


def leaf_names(node: Node, prefix: str) -> list[str]:
    """One name per leaf of ``node``, in flat order, joined by underscores: ``batch_image``, ``features_0``."""
    if isinstance(node, Leaf):
        return [prefix]
    if isinstance(node, Items):
        return [n for i, item in enumerate(node.items) for n in leaf_names(item, f"{prefix}_{i}")]
    if isinstance(node, Named):
        return [n for key, item in zip(node.keys, node.items, strict=True) for n in leaf_names(item, f"{prefix}_{key}")]
    return []


def _shift(node: Node, offset: int) -> None:
    if isinstance(node, Leaf):
        node.index += offset
    elif isinstance(node, (Items, Named)):
        for item in node.items:
            _shift(item, offset)


def _mismatch(where: str, expected: str, value: Any) -> InputError:
    if isinstance(value, Tensor):
        got = f"a tensor of shape {list(value.shape)}"
    elif isinstance(value, (list, tuple)):
        got = f"a {type(value).__name__} of {len(value)} items"
    elif isinstance(value, Mapping):
        got = f"a {type(value).__name__} with {list(value)}"
    else:
        got = repr(value)
    return InputError(
        f"Argument {where} is not what the module was compiled for.",
        expected=expected,
        got=got,
        remedy="call it as when it was compiled, or compile it again with example inputs of this kind",
    )
