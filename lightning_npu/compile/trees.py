"""Takes nested inputs and outputs apart into a template and its tensors, and puts them together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import fx


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one tensor in a template."""

    index: int


def is_value(leaf: object) -> bool:
    """Whether a leaf is something a graph computes: a tensor, or what stands for one (or for a size) in tracing."""
    return isinstance(leaf, torch.Tensor | fx.Proxy | torch.SymInt | torch.SymFloat | torch.SymBool)


def take_apart(
    tree: object, name: str = "", is_slot: Callable[[object], bool] = is_value
) -> tuple[Any, list[Any], list[str]]:
    """Replaces the tensors of nested tuples, lists, dicts, named tuples and dataclasses by slots.

    Args:
        tree: any nested structure; what is no container is a leaf.
        name: what the structure itself is called, the root of the leaves' names.
        is_slot: which leaves become slots; the others stay in the template as constants.

    Returns:
        The template, the leaves that were taken out, and their names (``batch['image']``, ``args[0]``).
    """
    leaves: list[Any] = []
    names: list[str] = []

    def leaf(value: object, path: str) -> object:
        if not is_slot(value):
            return value
        leaves.append(value)
        names.append(path)
        return Slot(len(leaves) - 1)

    return _walk(tree, name, leaf), leaves, names


def put_together(template: object, leaves: Sequence[Any]) -> Any:
    """The reverse of `take_apart`: a new structure with ``leaves[i]`` in the place of ``Slot(i)``."""
    if isinstance(template, Slot):
        return leaves[template.index]
    # The plain containers come first and are rebuilt without helpers, so that torch.compile can follow.
    if type(template) is tuple:
        return tuple([put_together(value, leaves) for value in template])
    if type(template) is list:
        return [put_together(value, leaves) for value in template]
    if type(template) is dict:
        return {key: put_together(value, leaves) for key, value in template.items()}
    return _walk(template, "", lambda value, _: leaves[value.index] if isinstance(value, Slot) else value)


def same_template(a: object, b: object) -> bool:
    """Whether two templates have the same containers, slots at the same places, and equal constants."""
    (shape_a, constants_a, _), (shape_b, constants_b, _) = (take_apart(t, is_slot=_is_constant) for t in (a, b))
    if len(constants_a) != len(constants_b) or not _same_containers(shape_a, shape_b):
        return False
    return all(_equal(x, y) for x, y in zip(constants_a, constants_b, strict=True))


def _is_constant(leaf: object) -> bool:
    return not isinstance(leaf, Slot)


def _equal(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (ValueError, RuntimeError, TypeError):  # arrays and the like, which compare element by element
        return False


def _same_containers(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Slot):
        return bool(a == b)
    if dataclasses.is_dataclass(a) and not isinstance(a, Mapping):
        return all(_same_containers(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same_containers(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(_same_containers(x, y) for x, y in zip(a, b, strict=True))


def _walk(tree: Any, path: str, leaf: Callable[[Any, str], Any]) -> Any:
    if isinstance(tree, Slot):
        return leaf(tree, path)
    if isinstance(tree, Mapping):
        items = {key: _walk(value, f"{path}[{key!r}]", leaf) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        if dataclasses.is_dataclass(tree):  # a Hugging Face ModelOutput is both: an ordered dict and a dataclass
            return type(tree)(**items)
        if isinstance(tree, MutableMapping):
            mapping = copy.copy(tree)
            mapping.update(items)
            return mapping
        return leaf(tree, path)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        rebuilt: Any = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = _walk(getattr(tree, field.name), f"{path}.{field.name}", leaf)
            object.__setattr__(rebuilt, field.name, value)  # works for frozen dataclasses too
        return rebuilt
    if isinstance(tree, torch.Size):
        return leaf(tree, path)
    if isinstance(tree, tuple | list):
        values = [_walk(value, f"{path}[{i}]", leaf) for i, value in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*values)
        return type(tree)(values)
    return leaf(tree, path)
