"""Who encodes which batch, where the accelerator is the bottleneck: the device, or the FP32 head in torch."""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from lightning_npu.errors import InputError

Balance = float | str


class Balancer:
    """Decides batch by batch.

    * "off": the device encodes everything.
    * a share from 0 to 1: the device encodes that share of the batches, evenly spread; the same batches for the same
      ``seed``.
    * "auto": whenever the device has at most one batch waiting, it gets the nearest one that it can finish before the
      training needs it; a batch that comes to its turn ungiven is encoded by the FP32 head on the training device. So
      the device is kept busy and no step is longer than with all batches encoded there: where a requested batch would
      take longer than encoding it again, it is encoded again.

    Args:
        balance: "off", "auto" or a share.
        seed: of the spread, for a share.

    Raises:
        InputError: another value.
    """

    def __init__(self, balance: Balance = "off", *, seed: int = 0) -> None:
        wrong = isinstance(balance, bool) or not (
            balance in ("off", "auto") or (isinstance(balance, (int, float)) and 0 <= balance <= 1)
        )
        if wrong:
            raise InputError("balance is wrong.", expected="'off', 'auto', or a share from 0 to 1", got=repr(balance))
        self.balance = balance
        self._phase = float(torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        self.offloaded, self.kept = 0, 0
        self._here = Stopwatch()

    @property
    def on(self) -> bool:
        """Whether some batches may be encoded by the FP32 head."""
        return self.balance != "off"

    @property
    def share(self) -> float:
        """The share of batches that was given to the device so far."""
        total = self.offloaded + self.kept
        return self.offloaded / total if total else 1.0

    def picks(self, number: int) -> bool:
        """Whether the device gets batch ``number``, counted from 0, when the share is fixed."""
        if isinstance(self.balance, str):
            return True
        share = float(self.balance)
        return math.floor((number + 1) * share + self._phase) > math.floor(number * share + self._phase)

    def count(self, *, here: bool) -> None:
        """Note who encodes a batch."""
        self.kept += here
        self.offloaded += not here

    def encode_again(self, remaining_s: float) -> bool:
        """Whether it is faster to encode a batch in torch than to wait this long for the device."""
        here_s = self._here.seconds()
        return self.balance == "auto" and here_s is not None and remaining_s > here_s

    def encoding(self, device: torch.device) -> Stopwatch:
        """A stopwatch for one encoding in torch: use it in a ``with`` block."""
        self._here.device = device
        return self._here


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """The median time of the last calls, on the device's own clock where it runs beside the host."""

    def __init__(self, keep: int = 9) -> None:
        self.device = torch.device("cpu")
        self._times_s: deque[float] = deque(maxlen=keep)
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=keep)
        self._started = 0.0

    def __enter__(self) -> Stopwatch:
        if self.device.type == "cuda":
            pair = (_event(), _event())
            pair[0].record(torch.cuda.current_stream(self.device))
            self._open.append(pair)
        else:
            self._started = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self._open[-1][1].record(torch.cuda.current_stream(self.device))
        else:
            self._times_s.append(time.perf_counter() - self._started)

    def seconds(self) -> float | None:
        """The median; None before the first call ended. Never waits."""
        while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
            start, end = self._open.popleft()
            self._times_s.append(start.elapsed_time(end) / 1e3)
        if not self._times_s:
            return None
        return sorted(self._times_s)[len(self._times_s) // 2]
