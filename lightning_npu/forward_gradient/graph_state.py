"""What a state dict of ``GraphWeights`` must be: integers of the same grids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.integer import Grid
from lightning_npu.forward_gradient.integer_weights import IntegerParameter
from lightning_npu.hashing import tensor_sha256


def fingerprints(parameters: Mapping[str, IntegerParameter]) -> dict[str, str]:
    """A hash of each parameter's grid, by name: what its integers stand for."""
    return {name: _fingerprint(parameter.grid) for name, parameter in parameters.items()}


def take(
    state: MutableMapping[str, Any], prefix: str, parameters: Mapping[str, IntegerParameter], grids: Mapping[str, str]
) -> None:
    """Check the integers in ``state`` and make parameters of them, which know their grid.

    Args:
        state: a state dict; entries that are not there are left to torch, which reports them.
        prefix: of the module's entries.
        parameters: what they are loaded into.
        grids: hashes of the grids that they were saved with; of none: as after ``strict=False``, not known.

    Raises:
        InputError: another dtype, another grid, or integers out of its bounds.
    """
    own = fingerprints(parameters)
    for name, parameter in parameters.items():
        value = state.get(prefix + name)
        if not isinstance(value, Tensor):
            continue
        if value.dtype != parameter.dtype:
            _refuse(name, "integers of another width", str(parameter.dtype), str(value.dtype))
        if name in grids and grids[name] != own[name]:
            _refuse(name, "integers of another grid", "the scales of this artifact", "other scales")
        plain = value.detach().as_subclass(Tensor)
        low, high = parameter.grid.lower, parameter.grid.upper
        if bool(((plain < low) | (plain > high)).any()):
            _refuse(name, "integers beyond the grid", f"{low} to {high}", f"{int(plain.min())} to {int(plain.max())}")
        state[prefix + name] = IntegerParameter(plain, parameter.grid)


def _fingerprint(grid: Grid) -> str:
    scale = tensor_sha256(torch.as_tensor(grid.scale))
    return hashlib.sha256(f"{scale}:{grid.lower}:{grid.upper}".encode()).hexdigest()


def _refuse(name: str, what: str, expected: str, got: str) -> None:
    raise InputError(
        f"The state dict holds {what} for '{name}': they would stand for other weights here.",
        expected=expected,
        got=got,
        remedy="load it into GraphWeights of the artifact, weight_bits and headroom that it was saved with, or save() "
        "the trained artifact there and open that",
    )
