"""Head and tail: graph modules whose parameters keep their names, called like the module they come from."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx.graph_module import reduce_graph_module

from lightning_npu.compile.trees import put_together, same_template, take_apart
from lightning_npu.errors import InputError


@dataclass(frozen=True)
class Crossing:
    """What goes from head to tail.

    Attributes:
        names: a name per tensor.
        passthrough: from position to the name of the input tensor that is handed on there, untouched. The head
            returns the very tensor object that it was given, so these need not go to the accelerator and must not be
            quantized. They come after all computed tensors.
    """

    names: tuple[str, ...]
    passthrough: Mapping[int, str]


@dataclass(frozen=True)
class Inputs:
    """How the split module is called.

    Attributes:
        signature: of its ``forward``, without ``self``.
        template: the structure of all arguments, defaults filled in, with a slot per tensor.
        names: a name per tensor: ``images``, ``batch['image']``, ``args[0]``.
        sizes: per tensor and axis the least and the greatest size (None: any); empty where all sizes are free.
    """

    signature: inspect.Signature
    template: Any
    names: tuple[str, ...]
    sizes: tuple[tuple[tuple[int, int | None], ...], ...] = ()

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of one call, in order.

        Raises:
            InputError: the call is not like the one that the module was split with.
        """
        template, leaves, _ = take_apart(arguments(self.signature, args, kwargs))
        if not same_template(template, self.template):
            raise InputError(
                "The head is called in another way than the module was split with.",
                expected=f"arguments like {self.template}",
                got=f"arguments like {template}",
                remedy="split the module again with example inputs like these",
            )
        for name, leaf, ranges in zip(self.names, leaves, self.sizes, strict=False):
            pairs = list(zip(leaf.shape, ranges, strict=False))
            if leaf.ndim != len(ranges) or not all(
                low <= n and (high is None or n <= high) for n, (low, high) in pairs
            ):
                wanted = [low if low == high else f"{low}..{high or ''}" for low, high in ranges]
                raise InputError(
                    f"Input '{name}' has a shape for which the split does not hold, because the module's Python code "
                    "looks at sizes.",
                    expected=f"sizes [{', '.join(map(str, wanted))}]",
                    got=f"sizes {list(leaf.shape)}",
                    remedy="split the module with example inputs of this shape",
                )
        return leaves


def arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults filled in, so that a call by position equals one by keyword."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


class _Part(fx.GraphModule):
    """A graph module with a signature: ``flat_forward`` is the generated code, ``_call`` what wraps it.

    Stays in eval mode whatever ``train`` says, and owns parameters that share their storage with the module that was
    split. Survives ``copy.deepcopy`` and ``pickle``.
    """

    _KEPT: ClassVar[str] = "lightning_npu.split"

    flat_forward: Callable[..., tuple[torch.Tensor, ...]]

    @classmethod
    def build(cls, attributes: dict[str, Any], graph: fx.Graph, transient: set[str], **kept: Any) -> Any:
        """Make a part of a graph and what it refers to; ``transient`` names buffers that no state dict has."""
        part = cls(attributes, graph, cls.__name__)
        part.meta[cls._KEPT] = {"transient": transient, **kept}
        return part._finish()

    def _finish(self) -> _Part:
        for name in self._kept["transient"]:
            owner, _, buffer = name.rpartition(".")
            self.get_submodule(owner)._non_persistent_buffers_set.add(buffer)
        for module in self.modules():
            module.training = False
        return self

    @property
    def _kept(self) -> dict[str, Any]:
        return self.meta[self._KEPT]  # type: ignore[no-any-return]

    @property
    def crossing(self) -> Crossing:
        """What goes from head to tail."""
        return self._kept["crossing"]  # type: ignore[no-any-return]

    @property
    def passthrough(self) -> dict[int, str]:
        """From a position among the tensors between head and tail to the input tensor that is handed on there."""
        return dict(self.crossing.passthrough)

    def train(self, mode: bool = True) -> _Part:
        """Stays in eval mode: the part is frozen."""
        return self

    def recompile(self) -> Any:
        """Generate the code anew, and put the structured call in front of it."""
        code = super().recompile()
        cls: Any = type(self)
        cls.flat_forward = cls.forward
        cls.forward = cls._call
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        part: Any = super().__deepcopy__(memo)
        return part._finish()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        base = next(cls for cls in type(self).__mro__ if cls in (Head, Tail))
        _, state = super().__reduce__()
        return _unpickle, (base, *state)


def _unpickle(cls: type[_Part], body: dict[str, Any], imports: str) -> _Part:
    meta = body["meta"]
    plain: Any = reduce_graph_module(body, imports)
    part = cls(plain, plain.graph, cls.__name__)
    part.meta = meta
    return part._finish()


class Head(_Part):
    """What runs up to the cut. Called like the split module; returns a tuple of tensors.

    Attributes:
        inputs: how it is called.
        crossing: what it returns.
        passthrough: which of its results are inputs that it hands on.
    """

    @property
    def inputs(self) -> Inputs:
        """How the split module is called."""
        return self._kept["inputs"]  # type: ignore[no-any-return]

    def recompile(self) -> Any:
        """Generate the code anew."""
        code = super().recompile()
        cls: Any = type(self)
        if self._KEPT in getattr(self, "meta", {}):
            cls.forward = _with_signature(cls._call, self.inputs.signature)
        return code

    def _finish(self) -> _Part:
        super()._finish()
        cls: Any = type(self)  # a class of this instance alone, as with every graph module
        cls.forward = _with_signature(cls._call, self.inputs.signature)
        return self

    def _call(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return self.flat_forward(*self.inputs.flatten(args, kwargs))


class Tail(_Part):
    """What runs after the cut. Takes the head's tensors, one by one; returns what the split module returns."""

    def _call(self, *tensors: torch.Tensor) -> Any:
        return put_together(self._kept["outputs"], self.flat_forward(*tensors))


def _with_signature(call: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    @functools.wraps(call)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *signature.parameters.values()]
    if "self" not in signature.parameters:
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


class Attributes:
    """Gives copies of a module's parts: parameters that share storage, all other state copied."""

    def __init__(self, module: nn.Module, lookups: list[tuple[nn.Module, str]]) -> None:
        self._lookups = lookups
        self._memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()
        }
        self._persistent = {
            f"{name}.{buffer}" if name else buffer
            for name, owner in module.named_modules(remove_duplicate=False)
            for buffer in owner._buffers
            if buffer not in owner._non_persistent_buffers_set
        }

    def collect(self, graph: fx.Graph, rename: Callable[[str], str]) -> tuple[dict[str, Any], set[str]]:
        """Renames the targets of a graph and copies what they refer to.

        Returns:
            From name to copy, and the names of buffers that no state dict of the original has.
        """
        copies: dict[str, Any] = {}
        transient: set[str] = set()
        nodes = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
        for node in sorted(nodes, key=lambda node: node.op):  # modules first: they bring their buffers along
            original = self._find(str(node.target))
            node.target = name = rename(str(node.target))
            if name not in copies:
                copies[name] = self._copy(original)
            if node.op == "get_attr" and not isinstance(copies[name], nn.Parameter) and name not in self._persistent:
                transient.add(name)
        return copies, transient

    def _find(self, target: str) -> Any:
        for root, prefix in self._lookups:
            value: Any = root
            try:
                for atom in (prefix + target).split("."):
                    value = getattr(value, atom)
            except AttributeError:
                continue
            return value
        raise AttributeError(target)

    def _copy(self, original: Any) -> Any:
        buffers = original.buffers() if isinstance(original, nn.Module) else (original,)
        for buffer in buffers:
            if isinstance(buffer, torch.Tensor) and id(buffer) not in self._memo:
                self._memo[id(buffer)] = buffer.detach().clone()
        return copy.deepcopy(original, self._memo)
