"""Random directions by number instead of by state: each is a function of (seed, step, probe, index) alone.

Nothing has to be stored to draw a direction again, to resume from a step counter, or to agree over ranks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_npu.errors import InputError

DISTRIBUTIONS = ("rademacher", "gaussian")


def direction(
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    probe: int,
    index: int,
    distribution: str = "rademacher",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """One random direction: zero mean and unit variance in each element, elements independent.

    It is drawn on the host and copied, so every device sees the same numbers. Signs are the raw bits of a Philox
    stream, whose values numpy guarantees; Gaussian numbers are those of numpy's ziggurat method on that stream, equal
    wherever numpy's method is (unchanged since 1.17).

    Args:
        shape: of the result.
        seed: of the run, any integer of 64 bits; callers that want other noise per rank add the rank.
        step: which step, from 0 on.
        probe: which probe of the step.
        index: which tensor of the probe.
        distribution: "rademacher", +1 or -1, each as likely; or "gaussian".
        dtype: of the result, floating or, for signs, signed integer. Gaussian numbers have the resolution of float32.
        device: where the result lies.

    Raises:
        InputError: an unknown distribution.
    """
    check_distribution(distribution)
    stream = np.random.Philox(key=key(seed, step, probe, index))
    if distribution == "gaussian":
        drawn = torch.from_numpy(np.random.Generator(stream).standard_normal(tuple(shape), dtype=np.float32))
    else:
        drawn = torch.from_numpy(_signs(stream, math.prod(shape))).view(tuple(shape))
    return drawn.to(device).to(dtype)


def key(seed: int, step: int, probe: int, index: int) -> int:
    """128 bits that differ wherever one of the four numbers does (BLAKE2b)."""
    packed = struct.pack("<4q", *(_wrap(number) for number in (seed, step, probe, index)))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=16).digest(), "little")


def check_distribution(distribution: object) -> None:
    """Refuse what is not a distribution.

    Raises:
        InputError: it is not one of :data:`DISTRIBUTIONS`.
    """
    if distribution not in DISTRIBUTIONS:
        raise InputError("The distribution is wrong.", expected=f"one of {DISTRIBUTIONS}", got=repr(distribution))


def _signs(stream: np.random.Philox, count: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    words = np.asarray(stream.random_raw(-(-count // 64)), dtype="<u8")
    bits = np.unpackbits(words.view(np.uint8), count=count).view(np.int8)
    np.left_shift(bits, 1, out=bits)
    np.subtract(bits, 1, out=bits)  # 0, 1 -> -1, +1
    return bits


def _wrap(number: int) -> int:
    """The integer modulo 2**64, as a signed one."""
    return (int(number) + 2**63) % 2**64 - 2**63
