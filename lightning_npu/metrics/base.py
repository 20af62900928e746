"""What the metrics share: exact states that neither precision nor device changes, and rows that know who wrote them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

HISTORY = 0  # the writer of what came out of a checkpoint
_COMPACT_AFTER = 64

Row = tuple[float, ...]
Rows = dict[tuple[int, int], Row]

_identity = (0, HISTORY)  # pid, writer


def this_writer() -> int:
    """A random number that names this process: two ranks never share it, forked and spawned ones neither."""
    global _identity
    if _identity[0] != os.getpid():
        _identity = (os.getpid(), int.from_bytes(os.urandom(8), "big") >> 1 or 1)
    return _identity[1]


class HostMetric(Metric):
    """A metric whose states stay on the host, in the dtype they were made with.

    They are a few numbers. On the host an update makes no GPU wait, and ``.to(bfloat16)``, ``.half()`` or a device
    without float64 cannot degrade them. Only while they are gathered do they visit the metric's device, since NCCL
    moves nothing else.
    """

    full_state_update = False
    is_differentiable = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        self._computed = None  # would be cast too
        return super()._apply(fn, exclude_state=tuple(self._defaults))

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any | None = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """Gather the states of all ranks; see ``torchmetrics.Metric.sync``."""
        super().sync(dist_sync_fn or self._gather, process_group, should_sync, distributed_available)

    def _gather(self, tensor: Tensor, group: Any | None = None) -> list[Tensor]:
        return [part.cpu() for part in gather_all_tensors(tensor.to(self.device), group)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self._defaults:
            state = getattr(self, name)  # a list would be shared with the caller's dict
            setattr(self, name, state.cpu() if isinstance(state, Tensor) else [part.cpu() for part in state])

    def _result(self, value: float) -> Tensor:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.tensor(value, dtype=dtype, device=self.device)


class LedgerMetric(HostMetric):
    """A metric whose state is rows of numbers, each by one writer (a process) about one subject.

    Rows of one writer and subject add up within a process. After a synchronisation, several of them can only be copies
    of one history (a metric that was filled before its ranks were spawned), of which the longest counts. What rows of
    different writers make together is the subclass's to say.

    Args:
        columns: numbers in a row.
        kwargs: see ``torchmetrics.Metric``.
    """

    ids: list[Tensor]
    values: list[Tensor]

    def __init__(self, columns: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._columns = columns
        self.add_state("ids", default=[], dist_reduce_fx="cat")  # int64 (rows, 2): writer, subject
        self.add_state("values", default=[], dist_reduce_fx="cat")  # float64 (rows, 1 + columns): updates, columns

    def _write(self, rows: Mapping[int, Row]) -> None:
        """Add one row per subject, by this process."""
        writer = this_writer()
        self._append({(writer, subject): (1.0, *row) for subject, row in rows.items()})
        if len(self.ids) > _COMPACT_AFTER:
            self._replace(self._rows())

    def _append(self, rows: Rows) -> None:
        self.ids.append(torch.tensor(list(rows), dtype=torch.int64, device="cpu").reshape(-1, 2))
        values = torch.tensor(list(rows.values()), dtype=torch.float64, device="cpu")
        self.values.append(values.reshape(-1, 1 + self._columns))

    def _replace(self, rows: Rows) -> None:
        self.ids, self.values = [], []
        self._append(rows)

    def _groups(self) -> dict[tuple[int, int], list[Row]]:
        groups: dict[tuple[int, int], list[Row]] = {}
        ids = [self.ids] if isinstance(self.ids, Tensor) else self.ids  # a tensor once it was synchronised
        values = [self.values] if isinstance(self.values, Tensor) else self.values
        for keys, numbers in zip(ids, values, strict=True):
            for (writer, subject), row in zip(keys.tolist(), numbers.tolist(), strict=True):
                groups.setdefault((writer, subject), []).append(tuple(row))
        return groups

    def _rows(self) -> Rows:
        """The sum of all rows of a writer and subject: updates first, then the columns."""
        return {
            key: tuple(math.fsum(column) for column in zip(*rows, strict=True)) for key, rows in self._groups().items()
        }

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any | None = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """Gather the rows of all ranks; see ``torchmetrics.Metric.sync``."""
        if not self._is_synced:
            self._replace(self._rows())  # also gives a rank without rows a tensor of the right dtype to gather
        was_synced = self._is_synced
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)
        if self._is_synced and not was_synced:
            self._replace({key: max(rows, key=lambda row: row[0]) for key, rows in self._groups().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        loads = f"{prefix}ids" in state_dict
        super()._load_from_state_dict(state_dict, prefix, *args)
        if loads:
            self._replace(self._as_history(self._rows()))

    def _as_history(self, rows: Rows) -> Rows:
        """Rows out of a checkpoint, in the form in which later ones are written beside them."""
        return rows
