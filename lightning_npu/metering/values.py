"""The figures that are logged, by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_npu import keys
from lightning_npu.metering.ledger import Account, MergedEpoch
from lightning_npu.metering.overlap import Overlap
from lightning_npu.metering.stretches import Rolling
from lightning_npu.metering.totals import Totals, add_up

if TYPE_CHECKING:
    from lightning_npu.lookahead import Statistics

Values = dict[str, float]

CUMULATIVE = frozenset(
    (keys.TOTAL_J, *(keys.kind_j(kind) for kind in keys.KINDS), *(keys.phase_j(phase) for phase in keys.PHASES))
)
"""Keys of energy since the start, which cannot go down."""


def of_account(account: Account) -> Values:
    """Energy so far: in all, by kind, by phase, with uncertainty and coverage; empty where no board could be read."""
    total = add_up(account.totals)
    if total is None:
        return {}
    values = {
        keys.TOTAL_J: total.energy_j,
        keys.UNCERTAINTY_J: total.uncertainty_j,
        keys.COVERAGE: total.coverage,
        keys.ELAPSED_S: account.elapsed_s,
    }
    for kind in keys.KINDS:
        part = add_up(account.totals, kind)
        if part is not None:
            values[keys.kind_j(kind)] = part.energy_j
    for phase, totals in account.phases.items():
        part = add_up(totals)
        if part is not None:
            values[keys.phase_j(phase)] = part.energy_j
    return values


def of_steps(rolling: Rolling, ranks_here: int) -> Values:
    """Energy per sample, step and optimizer step over the last steps, and the mean powers.

    Args:
        rolling: of this rank's boards, which are those of its host.
        ranks_here: ranks of the host, which train as many samples each.
    """
    values = of_power({key: total.mean_power_w for key, total in rolling.by_board.items()}, rolling.by_board)
    return values | of_work(rolling.by_board, rolling.samples * ranks_here, rolling.steps, rolling.batches)


def of_epoch(epoch: MergedEpoch) -> Values:
    """Energy of an epoch, and per sample and optimizer step in it."""
    whole = add_up(epoch.whole)
    values = {} if whole is None else {keys.EPOCH_J: whole.energy_j}
    return values | of_work(epoch.training, epoch.samples, epoch.steps)


def of_work(totals: Totals, samples: int, steps: int, batches: int = 0) -> Values:
    """Energy per unit of work; without work none."""
    total = add_up(totals)
    values: Values = {}
    if total is None:
        return values
    if samples:
        values[keys.PER_SAMPLE_J] = total.energy_j / samples
        if total.net_j is not None:
            values[keys.NET_PER_SAMPLE_J] = total.net_j / samples
    if steps:
        values[keys.PER_OPTIMIZER_STEP_J] = total.energy_j / steps
    if batches:
        values[keys.STEP_J] = total.energy_j / batches
    return values


def of_power(power_w: Mapping[str, float | None], by_board: Totals) -> Values:
    """Power of all boards, of each kind and of each board; boards whose power is not known are left out."""
    names = keys.board_names(total.board(key) for key, total in by_board.items())
    known = {key: watts for key, watts in power_w.items() if watts is not None and key in by_board}
    if not known:
        return {}
    values = {keys.board_power_w(names[key]): watts for key, watts in known.items()}
    if len(known) == len(by_board):  # a sum that leaves a board out would look like a saving
        values[keys.BOARD_POWER_W] = sum(known.values())
    for kind in keys.KINDS:
        boards = [key for key, total in by_board.items() if total.kind == kind]
        if boards and all(key in known for key in boards):
            values[keys.kind_power_w(kind)] = sum(known[key] for key in boards)
    return values


def of_health(health: Mapping[str, Mapping[str, Any]], by_board: Totals) -> Values:
    """How far counters agree with integrated power, where a board has both."""
    names = keys.board_names(total.board(key) for key, total in by_board.items())
    ratios = {key: health[key]["counter_ratio"] for key in by_board if key in health}
    return {keys.board_counter_ratio(names[key]): ratio for key, ratio in ratios.items() if ratio is not None}


def of_lookahead(statistics: Statistics) -> Values:
    """How the look-ahead works."""
    return {
        keys.WAIT_S: statistics.wait_s,
        keys.HIT_RATE: statistics.hit_rate,
        keys.QUEUE_DEPTH: float(statistics.queue_depth),
        **{keys.misses(cause): float(count) for cause, count in statistics.misses.items()},
    }


def of_overlap(overlap: Overlap | None) -> Values:
    """Overlap efficiency, once it is known."""
    return {} if overlap is None else {keys.OVERLAP_EFFICIENCY: overlap.efficiency}
