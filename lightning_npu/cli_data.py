"""What ``lightning-npu compile`` is given: modules and calibration data, by file or by ``MODULE:NAME``."""

from __future__ import annotations

import importlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from lightning_npu.errors import InputError, NPUError
from lightning_npu.tensor_spec import DTYPES

_BATCH = 8


def build_module(reference: str) -> nn.Module:
    """The ``nn.Module`` named by ``MODULE:NAME``, or what the function of that name builds.

    Raises:
        InputError: it cannot be imported or built, or is no ``nn.Module``.
    """
    found = _load_object(reference)
    if not isinstance(found, nn.Module) and callable(found):
        found = _guarded(found, f"'{reference}' cannot build a module", "a function that needs no arguments")
    if not isinstance(found, nn.Module):
        raise InputError(
            f"'{reference}' gives no nn.Module.",
            expected="an nn.Module, or a function that returns one",
            got=type(found).__name__,
            remedy="name the module itself, or the function that builds it",
        )
    return found


def calibration_batches(reference: str) -> tuple[Any, Iterable[Any]]:
    """The first batch, and all batches: read as they are needed, so that an endless loader is fine.

    Args:
        reference: an .npy file (one input), an .npz file (one array per input, by name), or ``MODULE:NAME`` of a
            tensor, an array, a mapping of them by input, an iterable of inputs, or a function that gives one of these.

    Raises:
        InputError: it cannot be read, is none of these, or holds nothing.
    """
    if Path(reference).suffix in (".npy", ".npz"):
        batches: Iterable[Any] = _from_file(Path(reference))
    else:
        found = _load_object(reference)
        if callable(found) and (isinstance(found, type) or not hasattr(found, "__iter__")):
            found = _guarded(found, f"'{reference}' cannot give calibration data", "a function that needs no arguments")
        batches = _from_object(found, reference)
    iterator = _read(batches, reference)
    first = next(iterator, None)
    if first is None:
        raise InputError(
            f"{reference} gives no inputs.",
            expected="at least one batch of real inputs",
            got="an empty file or iterable",
            remedy="give data like that of the training",
        )
    return first, itertools.chain([first], iterator)


def example(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that one batch stands for."""
    if isinstance(item, Mapping):
        return (), dict(item)
    return (tuple(item), {}) if isinstance(item, (tuple, list)) else ((item,), {})


# ---- objects


def _load_object(reference: str) -> Any:
    name, _, attribute = reference.partition(":")
    if not all((*name.split("."), *attribute.split("."))):
        raise InputError(
            f"'{reference}' does not name a Python object.",
            expected="MODULE:NAME",
            got=reference,
            remedy="for example my_package.policy:build_encoder",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found: Any = _guarded(
        lambda: importlib.import_module(name), f"'{reference}' cannot be imported", "a module that can be imported"
    )
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise InputError(
                f"'{reference}' cannot be imported: {error}.",
                expected=f"a module with a '{attribute}'",
                remedy="check the spelling",
            ) from error
    return found


def _guarded(call: Callable[[], Any], what: str, expected: str) -> Any:
    """Run the user's code; its failure is told in one line with the place in the code, as the command has no other."""
    try:
        return call()
    except NPUError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what}: {_told(error)}.",
            expected=expected,
            remedy="run it in Python first, in the directory in which this command runs",
        ) from error


def _told(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:500].rstrip(".")
    frames = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith("<frozen")]
    return f"{text} ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else text


# ---- calibration data


def _from_object(found: Any, reference: str) -> Iterable[Any]:
    if isinstance(found, (Tensor, np.ndarray)):
        return [(batch,) for batch in _split({"the data": _tensor(found, reference)}, reference)["the data"]]
    if (
        isinstance(found, Mapping)
        and found
        and all(isinstance(value, (Tensor, np.ndarray)) for value in found.values())
    ):
        return _by_name(
            {str(name): _tensor(value, f"{reference}, '{name}',") for name, value in found.items()}, reference
        )
    if isinstance(found, (str, bytes, Mapping)) or not (hasattr(found, "__iter__") or hasattr(found, "__getitem__")):
        raise InputError(
            f"'{reference}' gives no calibration data.",
            expected="a tensor, a mapping of tensors by input, or an iterable of inputs",
            got=type(found).__name__,
            remedy="name a loader, or a function that returns one",
        )
    made: Iterable[Any] = found
    return made


def _from_file(path: Path) -> Iterable[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            arrays = {"the data": loaded}
        else:
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
    except Exception as error:  # zip and NumPy have a dozen ways to say that a file is damaged
        raise InputError(
            f"{path} cannot be read: {_told(error)}.",
            expected="a NumPy file of plain arrays",
            remedy="write it with numpy.save or numpy.savez",
        ) from error
    tensors = {name: _tensor(array, f"{path}, '{name}',") for name, array in arrays.items()}
    if isinstance(loaded, np.ndarray):
        return [(batch,) for batch in _split(tensors, str(path))["the data"]]
    return _by_name(tensors, str(path))


def _by_name(tensors: Mapping[str, Tensor], where: str) -> list[dict[str, Tensor]]:
    parts = _split(tensors, where)
    return [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]


def _split(tensors: Mapping[str, Tensor], where: str) -> dict[str, tuple[Tensor, ...]]:
    """Batches along the first axis."""
    lengths = {name: tensor.shape[0] if tensor.ndim else None for name, tensor in tensors.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise InputError(
            f"{where} does not hold one entry per sample.",
            expected="arrays whose first axis counts the samples, all of one length",
            got=", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in tensors.items()),
            remedy="write all inputs of the same samples",
        )
    return {name: torch.split(tensor, _BATCH) if len(tensor) else () for name, tensor in tensors.items()}


def _tensor(data: np.ndarray[Any, Any] | Tensor, where: str) -> Tensor:
    """As a tensor in native byte order; floating data in FP32, the precision from which modules are compiled."""
    try:
        tensor = data if isinstance(data, Tensor) else torch.from_numpy(data.astype(data.dtype.newbyteorder("=")))
    except TypeError:
        tensor = None
    if tensor is None or tensor.dtype not in DTYPES.values():
        raise InputError(
            f"{where} holds values that no input can take.",
            expected=f"one of {list(DTYPES)}",
            got=str(data.dtype),
            remedy="convert the array, for example with array.astype(numpy.float32)",
        )
    if tensor.dtype in (torch.float64, torch.float16):
        click.echo(f"{where} holds {data.dtype}: converted to float32.", err=True)
        tensor = tensor.float()
    return tensor


def _read(batches: Iterable[Any], reference: str) -> Iterator[Any]:
    what, expected = f"{reference} failed while it was read", "an iterable of inputs"
    iterator = _guarded(lambda: iter(batches), what, expected)
    end = object()
    while True:
        item = _guarded(lambda: next(iterator, end), what, expected)
        if item is end:
            return
        yield item
