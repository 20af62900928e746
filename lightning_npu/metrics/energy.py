"""Joules per sample over ranks and nodes, each board counted once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.metrics.base import HISTORY, LedgerMetric, Row, Rows
from lightning_npu.power.base import BoardEnergy

_SAMPLES = 0  # the subject of rows that count samples; no board has it


class _Window(Protocol):
    @property
    def by_board(self) -> Mapping[str, BoardEnergy | None]: ...

    @property
    def missing(self) -> Mapping[str, str]: ...

    @property
    def energy_j(self) -> float | None: ...


ByBoard: TypeAlias = Mapping[str, "float | BoardEnergy | None"]
Energy: TypeAlias = "ByBoard | _Window | None"


def energy_per_sample(energy: Energy, samples: int) -> float:
    """Energy of all boards together over the samples that were processed meanwhile.

    >>> energy_per_sample({"node7/GPU-8f2c": 90.0, "node7/aries-0": 10.0}, samples=50)
    2.0
    >>> energy_per_sample({"node7/GPU-8f2c": 90.0, "node7/aries-0": None}, samples=50)
    nan

    Args:
        energy: gross joules (or a :class:`~lightning_npu.power.base.BoardEnergy`) by board key, or a window of an
            ``EnergyMonitor``. None, as a whole or for a board, means unknown.
        samples: how many samples.

    Returns:
        joules per sample; NaN where the energy of a board is unknown, no board was read, or there were no samples.

    Raises:
        InputError: the energy has no boards to belong to, or the count is negative.
    """
    boards, count = _by_board(energy), _count(samples)
    if not boards or not count:
        return math.nan
    return math.fsum(joules for joules, _ in boards.values()) / count


class EnergyPerSample(LedgerMetric):
    """Joules per sample over all updates and ranks; lower is better.

    Samples add up over ranks. Joules add up over distinct boards; a board that several processes read counts once, with
    the figure of the process whose readings cover the longest time. So every rank can pass what it reads, whether ranks
    share boards or not, and Lightning's or torchmetrics' own synchronisation gives the total of the job.

    >>> metric = EnergyPerSample()
    >>> metric.update({"node7/GPU-8f2c": 90.0, "node7/aries-0": 10.0}, samples=32)
    >>> metric.update({"node7/GPU-8f2c": 95.0, "node7/aries-0": 5.0}, samples=32)
    >>> metric.compute()
    tensor(3.1250, dtype=torch.float64)

    Energy that is unknown makes the figure NaN, never smaller:

    >>> metric.update(None, samples=32)
    >>> metric.compute()
    tensor(nan, dtype=torch.float64)

    A process that reads no board, since others do, passes an empty mapping, or always None. Metrics that come back
    pickled from other processes are merged by the same rule (``merge_state``).

    Boards travel as a 64-bit BLAKE2b hash of their key. Two boards of a job would be taken for one with a probability
    of n^2 / 2^65: 3e-12 for ten thousand boards.

    Once states are persistent, what a checkpoint holds counts as the past of every process that loads it and is added
    once. As with every metric, the states must be synchronised while a job of several ranks saves them.

    Args:
        kwargs: see ``torchmetrics.Metric``.
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(columns=4, **kwargs)  # joules, covered seconds, samples, updates of unknown energy

    def update(self, energy: Energy, samples: int) -> None:
        """Add the energy of a span of time and the samples processed in it.

        Args:
            energy: as for :func:`energy_per_sample`. Spans of one process must not overlap. A board that is left out
                has no part in this update; one whose energy is unknown is None.
            samples: how many samples, of this process; 0 for a span that only costs energy.

        Raises:
            InputError: the energy has no boards to belong to, or the count is negative.
        """
        boards, count = _by_board(energy), _count(samples)
        unknown = float(_is_unknown(energy))
        rows: dict[int, Row] = {_SAMPLES: (0.0, 0.0, float(count), unknown)}
        for key, (joules, covered_s) in boards.items():
            rows[board_hash(key)] = (joules, covered_s, 0.0, 0.0)
        self._write(rows)

    def compute(self) -> Tensor:
        """Joules per sample; float64, NaN where unknown."""
        rows = self._rows()
        past = {board: row[1] for (writer, board), row in rows.items() if writer == HISTORY and board != _SAMPLES}
        live = {board: joules for board, (joules, _) in _longest(rows).items()}
        samples = round(math.fsum(row[3] for (_, subject), row in rows.items() if subject == _SAMPLES))
        if not past and rows.get((HISTORY, _SAMPLES), (0.0,) * 4)[3]:
            return self._result(math.nan)  # the past had samples, and no board was read then
        total = {f"{board}": past.get(board, 0.0) + live.get(board, 0.0) for board in past.keys() | live.keys()}
        return self._result(energy_per_sample(total, samples))

    def _as_history(self, rows: Rows) -> Rows:
        samples = math.fsum(row[3] for (_, subject), row in rows.items() if subject == _SAMPLES)
        history: Rows = {(HISTORY, _SAMPLES): (1.0, 0.0, 0.0, samples, 0.0)}
        past = {board: row for (writer, board), row in rows.items() if writer == HISTORY and board != _SAMPLES}
        longest = _longest(rows)
        for board in past.keys() | longest.keys():
            joules, covered_s = longest.get(board, (0.0, 0.0))
            _, before_j, before_s, *_ = past.get(board, (0.0, 0.0, 0.0))
            history[HISTORY, board] = (1.0, joules + before_j, covered_s + before_s, 0.0, 0.0)
        return history


def _longest(rows: Rows) -> dict[int, tuple[float, float]]:
    """Joules and covered seconds of each board, by the process that covered it longest; history left out."""
    unknown = {writer for (writer, subject), row in rows.items() if subject == _SAMPLES and row[4]}
    best: dict[int, tuple[float, bool, float]] = {}
    for (writer, board), (_, joules, covered_s, *_) in rows.items():
        if board == _SAMPLES or writer == HISTORY:
            continue
        known = writer not in unknown and not math.isnan(joules)
        candidate = (covered_s, known, joules if known else math.nan)
        if board not in best or candidate[:2] > best[board][:2]:
            best[board] = candidate
        elif candidate[:2] == best[board][:2] and known:
            best[board] = max(best[board], candidate)
    return {board: (joules, covered_s) for board, (covered_s, _, joules) in best.items()}


def board_hash(key: str) -> int:
    """A board's key as a signed 64-bit number, the same in every process; never 0."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big", signed=True) or 1


def _is_unknown(energy: Energy) -> bool:
    if energy is None or isinstance(energy, Mapping):
        return energy is None
    return energy.energy_j is None


def _by_board(energy: Energy) -> dict[str, tuple[float, float]]:
    """Joules (NaN: unknown) and covered seconds by board key."""
    if energy is None:
        return {}
    boards = energy if isinstance(energy, Mapping) else getattr(energy, "by_board", None)
    if not isinstance(boards, Mapping) or not all(isinstance(key, str) for key in boards):
        raise InputError(
            "Energy must say which board it belongs to: only so is a board that several ranks read counted once.",
            expected="a mapping from board key to joules, a window of an EnergyMonitor, or None",
            got=repr(energy) if not isinstance(boards, Mapping) else f"keys {list(boards)}",
            remedy="pass {board.key: joules}, or the window itself",
        )
    unread = dict.fromkeys(getattr(energy, "missing", ()))  # boards of a window that could not be read
    return {key: _figures(value) for key, value in {**unread, **boards}.items()}


def _figures(value: float | BoardEnergy | None) -> tuple[float, float]:
    if value is None:
        return math.nan, 0.0
    if isinstance(value, BoardEnergy):
        joules, covered_s = float(value.energy_j), value.coverage * value.duration_s
    else:
        joules, covered_s = float(value), 0.0
    return (joules, covered_s) if math.isfinite(joules) else (math.nan, 0.0)


def _count(samples: int) -> int:
    count = int(samples)
    if count < 0 or count != samples:
        raise InputError(
            "Samples cannot be counted.",
            expected="a whole number, 0 or more",
            got=repr(samples),
            remedy="pass the batch size",
        )
    return count
