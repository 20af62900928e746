"""Energy per board, added up over time and merged over ranks, as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_npu.power.base import Board, BoardEnergy

_RANKS = {"ok": 0, "degraded": 1, "lost": 2}  # a state of a later version, out of a checkpoint, is the worst


@dataclass(frozen=True)
class BoardTotal:
    """What one board used in all, over one or more stretches of time.

    Attributes:
        kind: "gpu", "npu" or "cpu".
        name: the model, for logs.
        index: as in :class:`~lightning_npu.power.base.Board`.
        simulated: whether nothing of it is measured.
        energy_j: gross energy in joules.
        gain_j: uncertainty from the sensor's gain, in joules; adds up linearly.
        resolution_j: uncertainty from resolution, noise and edges; independent from stretch to stretch.
        gap_j: uncertainty from spans without readings; adds up linearly.
        duration_s: seconds.
        covered_s: seconds that fresh readings cover.
        max_power_w: highest power reading; None: there was none.
        method: "counter", "power" or "mixed".
        state: "ok", or the worst that was seen.
        idle_j: energy at idle power over the same time; None: no baseline.
    """

    kind: str
    name: str
    index: int | None
    simulated: bool
    energy_j: float
    gain_j: float
    resolution_j: float
    gap_j: float
    duration_s: float
    covered_s: float
    max_power_w: float | None
    method: str
    state: str
    idle_j: float | None = None

    @classmethod
    def of(cls, board: Board, energy: BoardEnergy, idle_power_w: float | None = None) -> BoardTotal:
        """The total of one window."""
        return cls(
            board.kind,
            board.name,
            board.index,
            board.simulated,
            energy.energy_j,
            energy.gain_j,
            energy.resolution_j,
            energy.gap_j,
            energy.duration_s,
            energy.coverage * energy.duration_s,
            energy.max_power_w,
            energy.method,
            energy.state,
            None if idle_power_w is None else idle_power_w * energy.duration_s,
        )

    @property
    def uncertainty_j(self) -> float:
        """Half-width of the interval that holds the true energy, in joules."""
        return self.gain_j + self.resolution_j + self.gap_j

    @property
    def coverage(self) -> float:
        """Share of the time that fresh readings cover; NaN for no time."""
        return self.covered_s / self.duration_s if self.duration_s > 0 else math.nan

    @property
    def mean_power_w(self) -> float | None:
        """Gross energy over duration; None for no time."""
        return self.energy_j / self.duration_s if self.duration_s > 0 else None

    @property
    def net_j(self) -> float | None:
        """Gross less idle energy; None without a baseline. Not clipped."""
        return None if self.idle_j is None else self.energy_j - self.idle_j

    def then(self, later: BoardTotal) -> BoardTotal:
        """This stretch of time and another one of the same board."""
        powers = [power for power in (self.max_power_w, later.max_power_w) if power is not None]
        without = self.idle_j is None or later.idle_j is None
        return replace(
            later,
            simulated=self.simulated or later.simulated,
            energy_j=self.energy_j + later.energy_j,
            gain_j=self.gain_j + later.gain_j,
            resolution_j=math.hypot(self.resolution_j, later.resolution_j),
            gap_j=self.gap_j + later.gap_j,
            duration_s=self.duration_s + later.duration_s,
            covered_s=self.covered_s + later.covered_s,
            max_power_w=max(powers, default=None),
            method=self.method if self.method == later.method else "mixed",
            state=worst((self.state, later.state)),
            idle_j=None if without else (self.idle_j or 0.0) + (later.idle_j or 0.0),
        )

    def part(self, share: float) -> BoardTotal:
        """That share of the time, at the same power; the power within it may have been anything up to double."""
        apart_j = self.energy_j * share * (1.0 - share)
        return replace(
            self,
            energy_j=self.energy_j * share,
            gain_j=self.gain_j * share,
            resolution_j=math.hypot(self.resolution_j * share, apart_j),
            gap_j=self.gap_j * share,
            duration_s=self.duration_s * share,
            covered_s=self.covered_s * share,
            idle_j=None if self.idle_j is None else self.idle_j * share,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived ones among them."""
        return asdict(self) | {
            "uncertainty_j": self.uncertainty_j,
            "coverage": self.coverage if self.duration_s > 0 else None,
            "net_j": self.net_j,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BoardTotal:
        """The reverse of :meth:`to_json`."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})

    def board(self, key: str) -> Board:
        """The board as far as names need it."""
        return Board(key, self.kind, self.name, self.index, simulated=self.simulated)


Totals = dict[str, BoardTotal]
"""Board key to what it used."""


def worst(states: Iterable[str]) -> str:
    """The worst of several states; "ok" for none."""
    return max(states, key=lambda state: _RANKS.get(state.split(":")[0], len(_RANKS)), default="ok")


def then(earlier: Mapping[str, BoardTotal], later: Mapping[str, BoardTotal]) -> Totals:
    """Two stretches of time, one after the other: boards of both add up."""
    joined = dict(earlier)
    for key, total in later.items():
        joined[key] = joined[key].then(total) if key in joined else total
    return joined


def without(whole: Mapping[str, BoardTotal], part: Mapping[str, BoardTotal]) -> Totals:
    """A stretch of time less a stretch within it. Differences of one curve: gains shrink along, edges come on top."""
    left = dict(whole)
    for key, inner in part.items():
        if key not in left:
            continue
        outer = left[key]
        net = None if outer.idle_j is None or inner.idle_j is None else outer.idle_j - inner.idle_j
        left[key] = replace(
            outer,
            energy_j=outer.energy_j - inner.energy_j,
            gain_j=max(0.0, outer.gain_j - inner.gain_j),
            resolution_j=math.hypot(outer.resolution_j, inner.resolution_j),
            gap_j=max(0.0, outer.gap_j - inner.gap_j),
            duration_s=outer.duration_s - inner.duration_s,
            covered_s=max(0.0, outer.covered_s - inner.covered_s),
            idle_j=net,
        )
    return left


def merge(ranks: Iterable[Mapping[str, BoardTotal]]) -> Totals:
    """What several ranks saw at the same time: a board counts once, as seen by the rank that covered most of it."""
    merged: Totals = {}
    for totals in ranks:
        for key, total in totals.items():
            if key not in merged or total.covered_s > merged[key].covered_s:
                merged[key] = total
    return merged


@dataclass(frozen=True)
class Sum:
    """Several boards together.

    Attributes:
        energy_j: gross.
        uncertainty_j: gains and gaps add up, resolutions of different sensors are independent.
        coverage: the lowest of the boards.
        net_j: gross less idle; None where a board has no baseline.
        mean_power_w: sum of the boards' mean powers.
        simulated: whether any of it is simulated.
        state: the worst.
    """

    energy_j: float
    uncertainty_j: float
    coverage: float
    net_j: float | None
    mean_power_w: float
    simulated: bool
    state: str


def add_up(totals: Mapping[str, BoardTotal], kind: str | None = None) -> Sum | None:
    """The sum over boards, of one kind or of all; None where there is none: an absent sensor is not 0 J."""
    chosen = [total for total in totals.values() if kind in (None, total.kind)]
    if not chosen:
        return None
    nets = [total.net_j for total in chosen]
    return Sum(
        energy_j=math.fsum(total.energy_j for total in chosen),
        uncertainty_j=math.fsum(total.gain_j + total.gap_j for total in chosen)
        + math.hypot(*(total.resolution_j for total in chosen)),
        coverage=min(total.coverage for total in chosen),
        net_j=None if None in nets else math.fsum(net for net in nets if net is not None),
        mean_power_w=math.fsum(total.mean_power_w or 0.0 for total in chosen),
        simulated=any(total.simulated for total in chosen),
        state=worst(total.state for total in chosen),
    )
