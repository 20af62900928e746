"""How a replaced module is called: ``*args, **kwargs`` as flat tensors and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.places import constants, leaf_names, unwritable_keys
from lightning_npu.structure import Constant, Items, Leaf, Named, Node, describe, is_array, node_from_json


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
            InputError: the arguments do not fit the signature, or hold what cannot be recorded.
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
            _require_recordable(name, node)
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


def _shift(node: Node, offset: int) -> None:
    if isinstance(node, Leaf):
        node.index += offset
    elif isinstance(node, (Items, Named)):
        for item in node.items:
            _shift(item, offset)


def _require_recordable(name: str, node: Node) -> None:
    for place, held in constants(node, f"'{name}'").items():
        if is_array(held.original):
            raise InputError(
                f"Argument {place} is an array, which would be taken for a constant.",
                expected="a torch tensor",
                got=f"{type(held.original).__name__} of shape {list(held.original.shape)}",
                remedy="convert it: torch.as_tensor(array)",
            )
    if odd := unwritable_keys(node):
        raise InputError(
            f"Argument '{name}' holds a dict with keys that an artifact cannot record.",
            expected="keys that are texts or numbers",
            got=f"{type(odd[0]).__name__} {odd[0]!r}"[:200],
            remedy="use the key's name or value instead",
        )
