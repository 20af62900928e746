"""Which device and which of its cores a process takes, when several processes of a host train together."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_npu.errors import RuntimeUnavailableError

# local rank and number of ranks on this host, as launchers say them
_LAUNCHERS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Place:
    """A device, and this process' share of it.

    Attributes:
        number: the device.
        position: of this process among those that share the device, from 0 on.
        sharers: processes that share the device.
    """

    number: int
    position: int = 0
    sharers: int = 1


def local_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """This process' rank on its host, and how many ranks the host has at most.

    Where a launcher tells the number of ranks of all hosts only, that is the answer: shares become smaller than they
    could be, never too large.
    """
    for rank_name, size_name in _LAUNCHERS:
        rank = _number(environ.get(rank_name))
        if rank is None:
            continue
        size = _number(environ.get(size_name))
        if size is None:
            size = _number(environ.get("WORLD_SIZE"))
        return rank, max(size or 1, rank + 1)
    return _distributed()


def _distributed() -> tuple[int, int]:
    """Ranks of an initialised process group: of all hosts, when no launcher says which are this host's."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def choose(
    numbers: Sequence[int], device_index: int | None, ranks_per_device: int | None, local: tuple[int, int]
) -> Place:
    """The place of one process.

    Args:
        numbers: the devices of this host.
        device_index: the number of the device that the user chose; None: the local rank chooses.
        ranks_per_device: ranks that share this process' device; None: found out from the number of ranks. With a
            chosen device, all ranks of the host are taken to share it.
        local: this process' rank on its host, and how many there are.

    Raises:
        RuntimeUnavailableError: there is no device, or none of that number.
    """
    if not numbers:
        raise RuntimeUnavailableError(
            "qbruntime finds no ARIES device.",
            expected="a device that QBRUNTIME_VISIBLE_DEVICES does not hide and that this user may open",
            got=f"QBRUNTIME_VISIBLE_DEVICES={os.environ.get('QBRUNTIME_VISIBLE_DEVICES', '(not set)')}",
            remedy="`lightning-npu doctor` says what is missing; `mobilint-cli status` lists the boards",
        )
    rank, size = local
    if device_index is not None:
        if device_index not in numbers:
            raise RuntimeUnavailableError(
                f"There is no Mobilint device {device_index}.", expected=f"one of {list(numbers)}", got=device_index,
                remedy="leave device_index out to let the local rank choose",
            )  # fmt: skip
        sharers = ranks_per_device or size
        return Place(device_index, rank % sharers, sharers)
    column, position = rank % len(numbers), rank // len(numbers)
    sharers = ranks_per_device or (size - column + len(numbers) - 1) // len(numbers)
    if position >= sharers:
        raise RuntimeUnavailableError(
            f"Rank {rank} of this host has no place on a Mobilint device.",
            expected=f"{sharers} ranks on each of {len(numbers)} devices at most, as ranks_per_device says",
            got=f"{size} ranks",
            remedy="leave ranks_per_device out, or start fewer ranks",
        )
    return Place(numbers[column], position, sharers)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None
