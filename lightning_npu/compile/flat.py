"""A module seen as a function from flat tensors to flat tensors, and what those tensors look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.compile.graph_names import identifier, leaves, unique
from lightning_npu.errors import CompileError, InputError
from lightning_npu.places import constants, unwritable_keys
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Constant, Items, Leaf, Named, Node, describe
from lightning_npu.tensor_spec import DTYPES, TensorSpec

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LAYOUTS = {1: "", 2: "C", 3: "LC", 4: "CHW"}


class FlatModule(nn.Module):
    """Wraps a module so that tensors go in positionally and a tuple of tensors comes out.

    Outputs that occur twice are given once, outputs that are inputs handed through are left out, and so is all that
    is no tensor; :attr:`structure` puts everything back.

    Args:
        module: the module, in eval mode.
        args: example positional arguments.
        kwargs: example keyword arguments.

    Attributes:
        signature: how the module is called.
        structure: what it returns; leaves count the flat outputs first, then the flat inputs.
        constants: the values in it that are no tensors, by their place.
        example: the flat inputs of the example call.
        written: names of the inputs that the module changes in place; it is given copies of them.

    Raises:
        InputError: the arguments do not fit, or hold no tensor.
        CompileError: the module fails on them, or returns what is neither tensor nor plain data.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.signature, flat = CallSignature.record(module.forward, args, kwargs)
        with torch.inference_mode(False):  # inference tensors cannot be traced
            self.example: tuple[Tensor, ...] = tuple(tensor.detach().clone() for tensor in flat)
        self._written: frozenset[int] = frozenset()
        if not self.example:
            raise InputError(
                "The example inputs hold no tensor.", expected="at least one tensor", remedy="pass example inputs"
            )
        self.structure, self._keep = self._trace_outputs()
        self.constants = constants(self.structure, "output")
        self.output_count = len(self._keep)
        self.written = tuple(name for i, name in enumerate(self.signature.tensor_names()) if i in self._written)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the module on flat inputs; gives its flat outputs."""
        return self.call(tensors)[0]

    def call(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Node]:
        """The flat outputs, and the structure that they come in."""
        given = [tensor.clone() if index in self._written else tensor for index, tensor in enumerate(tensors)]
        args, kwargs = self.signature.arguments(given)
        structure, found = describe(self.module(*args, **kwargs))
        return tuple(found[index] for index in self._keep), structure

    def input_names(self) -> list[str]:
        """A valid, unique graph name per flat input."""
        return unique([identifier(name) for name in self.signature.tensor_names()], taken=set())

    def output_names(self) -> list[str]:
        """A valid graph name per flat output, unique among inputs and outputs."""
        names = ["output"] * self.output_count
        for index, name in leaves(self.structure, "output"):
            if index < self.output_count:
                names[index] = identifier(name)
        return unique(names, taken=set(self.input_names()))

    def _trace_outputs(self) -> tuple[Node, list[int]]:
        with torch.inference_mode(False):
            given = [tensor.clone() for tensor in self.example]
        args, kwargs = self.signature.arguments(given)
        try:
            with torch.no_grad():
                result = self.module(*args, **kwargs)
        except Exception as error:
            raise CompileError(
                f"{type(self.module).__name__} fails on the example inputs: {error}",
                got=", ".join(f"{list(t.shape)} {t.dtype}" for t in self.example),
                remedy="check that the module runs on them in eval mode",
            ) from error
        self._written = frozenset(index for index, tensor in enumerate(given) if tensor._version)
        handed = {id(tensor): index for index, tensor in enumerate(given) if index not in self._written}
        structure, found = describe(result)
        keep: list[int] = []
        place: dict[int, int] = {}  # id of a tensor -> its index among the kept outputs
        for index, tensor in enumerate(found):
            if id(tensor) not in place and id(tensor) not in handed:
                place[id(tensor)] = len(keep)
                keep.append(index)
        if not keep:
            raise CompileError(
                f"{type(self.module).__name__} computes no tensor.",
                expected="at least one output that is not merely an input handed through",
                got=type(result).__name__,
            )
        inputs = {key: len(keep) + index for key, index in handed.items()}
        _renumber(structure, [place.get(id(tensor), inputs.get(id(tensor), -1)) for tensor in found])
        _require_plain(structure)
        return structure, keep


def tensor_specs(
    flat: FlatModule, *, batch_axis: int | Sequence[int | None] = 0, batch_size: int | None = None
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """What goes in and comes out, with the batch axis of each found by running the module on two batch sizes.

    Args:
        flat: the flat module.
        batch_axis: the inputs' batch axis: one for all (an input whose size there differs from the first input's
            is taken for one that all samples share), or one per input, None for a shared input.
        batch_size: samples per call to fix; None leaves the batch dynamic.

    Raises:
        CompileError: the module does not run on another batch size than the example's, and none is fixed; or it
            returns something that depends on the batch size and is no tensor.
        InputError: ``batch_axis`` does not fit the inputs.
    """
    axes = _input_axes(flat.example, batch_axis)
    sizes = [int(t.shape[axis]) for t, axis in zip(flat.example, axes, strict=True) if axis is not None]
    if not sizes or min(sizes) == 0:
        raise InputError(
            "The example inputs have no samples.", got=[list(t.shape) for t in flat.example], remedy="pass real inputs"
        )
    fixed = batch_size is not None
    few, more = (batch_size or 2), (batch_size or 2) + 1
    small = _run(flat, resize_batch(flat.example, axes, few), few, batch_size)
    try:
        large = _run(flat, resize_batch(flat.example, axes, more), more, batch_size)
    except CompileError:
        if not fixed:
            raise
        large = None  # a module for one batch size: its batch axis is the one of that size
    inputs = tuple(
        _spec(name, tensor, axis, few if fixed else None)
        for name, tensor, axis in zip(flat.input_names(), resize_batch(flat.example, axes, few), axes, strict=True)
    )
    outputs = tuple(
        _spec(
            name,
            tensor,
            _output_axis(name, tensor, None if large is None else large[index], few),
            few if fixed else None,
        )
        for index, (name, tensor) in enumerate(zip(flat.output_names(), small, strict=True))
    )
    return inputs, outputs


def resize_batch(tensors: Sequence[Tensor], axes: Sequence[int | None], size: int) -> tuple[Tensor, ...]:
    """The same inputs with ``size`` samples, made by repeating or dropping samples."""
    resized = []
    for tensor, axis in zip(tensors, axes, strict=True):
        if axis is not None:
            index = torch.arange(size, device=tensor.device) % tensor.shape[axis]
            tensor = tensor.index_select(axis, index)
        resized.append(tensor)
    return tuple(resized)


def _input_axes(example: Sequence[Tensor], batch_axis: int | Sequence[int | None]) -> list[int | None]:
    if not isinstance(batch_axis, int):
        axes = list(batch_axis)
        if len(axes) != len(example):
            raise InputError(
                "batch_axis does not fit the inputs.", expected=f"{len(example)} axes, one per tensor", got=axes
            )
        for axis, tensor in zip(axes, example, strict=True):
            if axis is not None and not 0 <= axis < tensor.ndim:
                raise InputError(
                    "batch_axis does not fit the inputs.",
                    expected=f"None or 0 to {tensor.ndim - 1} for an input of shape {list(tensor.shape)}",
                    got=axis,
                )
        return axes
    if batch_axis < 0:
        raise InputError("batch_axis is negative.", expected="an axis counted from the front", got=batch_axis)
    first = next((t for t in example if t.ndim > batch_axis), None)
    size = None if first is None else first.shape[batch_axis]
    return [batch_axis if t.ndim > batch_axis and t.shape[batch_axis] == size else None for t in example]


def _output_axis(name: str, small: Tensor, large: Tensor | None, few: int) -> int | None:
    if large is None:
        return next((axis for axis, size in enumerate(small.shape) if size == few), None)
    if small.ndim != large.ndim:
        raise CompileError(f"The rank of output '{name}' depends on the batch size.", remedy="pass batch_size=...")
    changed = [axis for axis in range(small.ndim) if small.shape[axis] != large.shape[axis]]
    if len(changed) > 1 or (changed and large.shape[changed[0]] != few + 1):
        raise CompileError(
            f"Output '{name}' does not keep samples apart.",
            expected="one axis that counts samples",
            got=f"{list(small.shape)} for {few} samples, {list(large.shape)} for {few + 1}",
            remedy="move the reshape that folds samples into another axis out of the module, or cut before it",
        )
    return changed[0] if changed else None


def _run(flat: FlatModule, inputs: Sequence[Tensor], size: int, fixed: int | None) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():
            outputs, structure = flat.call(inputs)
    except Exception as error:
        raise CompileError(
            f"The module does not run on a batch of {size}: {error}",
            expected="a module that takes any number of samples" if fixed is None else f"one that takes {fixed}",
            remedy="pass batch_size=N to fix the batch, or batch_axis=[...] if an input's batch axis is not 0",
        ) from error
    found = constants(structure, "output")
    for place in {**flat.constants, **found}:
        then, now = flat.constants.get(place), found.get(place)
        if then is None or now is None or repr(then.value) != repr(now.value):
            raise CompileError(
                f"The module returns a value that is no tensor and changes from call to call: {place}.",
                expected="tensors, and other values only if they are always the same: they are baked in",
                got=f"{_held(then)} for the example inputs, {_held(now)} for {size} samples",
                remedy="return tensors only, and take sizes from them where they are needed (features.shape[0])",
            )
    return outputs


def _spec(name: str, tensor: Tensor, axis: int | None, fixed: int | None) -> TensorSpec:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        raise CompileError(
            f"'{name}' is {tensor.dtype}.", expected="an FP32 module and FP32 inputs", remedy="convert with .float()"
        )
    if tensor.dtype not in _DTYPE_NAMES:
        raise CompileError(f"'{name}' has a dtype that no artifact can hold.", expected=list(DTYPES), got=tensor.dtype)
    shape: list[int | None] = [int(size) for size in tensor.shape]
    if axis is not None:
        shape[axis] = fixed
    letters = list(_LAYOUTS.get(tensor.ndim, "?" * (tensor.ndim - 1)))
    if axis is None:
        letters = ["?"] * tensor.ndim
    else:
        letters.insert(axis, "N")
    return TensorSpec(name, tuple(shape), _DTYPE_NAMES[tensor.dtype], "".join(letters), axis)


def _renumber(node: Node, indices: Sequence[int]) -> None:
    if isinstance(node, Leaf):
        node.index = indices[node.index]
    elif isinstance(node, (Items, Named)):
        for item in node.items:
            _renumber(item, indices)


def _require_plain(structure: Node) -> None:
    for place, held in constants(structure, "output").items():
        if held.opaque:
            raise CompileError(
                f"The module returns an object that is neither a tensor nor plain data: {place} is {held.value[:80]}.",
                expected="tensors, texts and finite numbers in tuples, lists, dicts, named tuples or dataclasses",
                remedy="return its tensors instead",
            )
    if odd := unwritable_keys(structure):
        raise CompileError(
            "The module returns a dict with keys that an artifact cannot record.",
            expected="keys that are texts or numbers",
            got=f"{type(odd[0]).__name__} {odd[0]!r}"[:200],
            remedy="return the key's name or value instead of the key",
        )


def _held(constant: Constant | None) -> str:
    return "nothing" if constant is None else repr(constant.value)
