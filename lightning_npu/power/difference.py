"""The energy of a window: the difference of a curve at two moments, with all that is known about its error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_npu.power.assembly import Assembly
from lightning_npu.power.base import BoardEnergy
from lightning_npu.power.series import Point, Series
from lightning_npu.power.uncertainty import half_width

_NEARLY_ALL = 0.999  # share of a window by one method that names it


@dataclass(frozen=True)
class _Edge:
    point: Point
    settled: bool


def measure(curve: Assembly, t0_s: float, t1_s: float, *, gain: float) -> BoardEnergy | None:
    """Energy between two moments; None where nothing is known.

    Args:
        curve: the board's curve.
        t0_s: begin.
        t1_s: end, not before the begin.
        gain: relative gain error that the sensor may have.
    """
    series = curve.series
    if series is None or not _known(curve, series, t0_s, t1_s):
        return None
    begin, end = _edge(curve, series, t0_s), _edge(curve, series, t1_s)
    duration = t1_s - t0_s
    energy = max(0.0, end.point.energy_j - begin.point.energy_j)
    gap_s = end.point.gap_s - begin.point.gap_s
    gain_j = gain * energy
    ratio = curve.check.ratio
    if ratio is not None and not curve.check.sound:
        gain_j = max(gain_j, energy * abs(1.0 / max(ratio, 1e-3) - 1.0))  # the two sensors differ: one is wrong by it
    resolution_j = half_width(_variance(series, begin.point, end.point, duration)) if duration > 0 else 0.0
    gap_j = end.point.gap_j - begin.point.gap_j
    return BoardEnergy(
        energy_j=energy,
        uncertainty_j=gain_j + resolution_j + gap_j,
        gain_j=gain_j,
        resolution_j=resolution_j,
        gap_j=gap_j,
        coverage=min(1.0, max(0.0, 1.0 - gap_s / duration)) if duration > 0 else 1.0,
        duration_s=duration,
        max_power_w=curve.peaks.within(t0_s, t1_s),
        method=_method(curve, series, begin.point, end.point, t0_s, t1_s),
        state=curve.log.within(t0_s, t1_s),
        settled=begin.settled and end.settled,
    )


def _known(curve: Assembly, series: Series, t0_s: float, t1_s: float) -> bool:
    if t1_s <= series.first_s - curve.longest_gap_s:
        return False
    if len(series) < 2 and curve.newest_w is None:
        return False
    reach_s = 0.0 if curve.log.holds("lost") else curve.longest_gap_s
    return t0_s <= max(series.last_s, curve.heard_s + reach_s)


def _edge(curve: Assembly, series: Series, time_s: float) -> _Edge:
    point = series.at(time_s)
    if time_s < series.first_s:
        return _Edge(_before(curve, series, point, time_s), settled=curve.first_w is not None)
    if time_s > series.last_s:
        return _Edge(_after(curve, series, point, time_s), settled=False)
    return _Edge(point, settled=point.final)


def _before(curve: Assembly, series: Series, point: Point, time_s: float) -> Point:
    """Reach back from the first knot with the first power, no further than a gap; all of it counts as a gap."""
    missing = series.first_s - time_s
    power = curve.first_w or 0.0
    reach = power * min(missing, curve.longest_gap_s)
    return replace(point, energy_j=-reach, gap_s=-missing, gap_j=-power * missing, edge_j2=0.0, age_j=0.0)


def _after(curve: Assembly, series: Series, point: Point, time_s: float) -> Point:
    """Go on from the last knot with the newest power; nothing is added for the time in which a board is lost."""
    lost = curve.log.holds("lost")
    known_s = min(time_s, max(series.last_s, curve.heard_s if lost else time_s))
    power = curve.newest_w if not lost else None
    span = curve.tail.between(series.last_s, known_s, power)
    level = power if power is not None else series.slope_w(len(series) - 1)
    ahead = known_s - series.last_s
    energy = span.energy_j if span is not None else level * ahead
    spread = max(curve.integral.spread_w, 0.5 * level)
    silent = max(0.0, time_s - max(curve.heard_s, series.last_s))
    gap_s = silent if lost or silent > curve.longest_gap_s else 0.0
    return replace(
        point,
        energy_j=point.energy_j + energy,
        gap_s=point.gap_s + gap_s,
        gap_j=point.gap_j + gap_s * max(spread, level),
        counted_s=point.counted_s + (ahead if curve.by_counter else 0.0),
        edge_j2=point.edge_j2 + (spread * max(0.0, time_s - series.last_s - gap_s)) ** 2 / 3.0,
    )


def _variance(series: Series, begin: Point, end: Point, duration: float) -> float:
    ages = (begin.age_j**2 + end.age_j**2) / 14.0 + (end.age_j - begin.age_j) ** 2 / 6.0
    if begin.cell == end.cell and end.fraction > begin.fraction and end.energy_j <= series.last_j:
        return series.within_cell(end.cell, end.fraction - begin.fraction) + ages
    own = max(0.0, end.variance_j2 - begin.variance_j2)
    if duration < end.reach_s:
        own *= duration / end.reach_s
    return max(0.0, own + begin.edge_j2 + end.edge_j2) + ages


def _method(curve: Assembly, series: Series, begin: Point, end: Point, t0_s: float, t1_s: float) -> str:
    seconds = max(t1_s, series.first_s) - max(t0_s, series.first_s)
    if seconds <= 0:
        return "counter" if curve.by_counter else "power"
    counted = end.counted_s - begin.counted_s
    measured = max(counted, seconds - (end.gap_s - begin.gap_s))
    share = counted / measured if measured > 0 else 0.0
    if math.isclose(share, 0.0, abs_tol=1.0 - _NEARLY_ALL):
        return "power"
    return "counter" if share > _NEARLY_ALL else "mixed"
