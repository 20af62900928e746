"""Sensors over exactly known power traces, without clock or threads; run it for the table of errors.

``python tests/power_simulation.py [--held-out] [--ideal] [--other]``
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_npu.power.base import Board, BoardEnergy, Reading
from lightning_npu.power.curve import BoardCurve

LENGTHS_S = (0.1, 1.0, 10.0)
PERIODS_S = (0.05, 0.13, 0.37, 0.511, 1.0, 2.07)
HELD_OUT_S = (0.07, 0.09, 0.23, 0.7, 1.31, 1.73)
DUTIES = (0.3, 0.5, 0.7)


class Trace:
    """A power trace whose energy is known exactly."""

    def power_w(self, time_s: float) -> float:
        raise NotImplementedError

    def energy_j(self, time_s: float) -> float:
        """Energy from time 0 on."""
        raise NotImplementedError


@dataclass(frozen=True)
class Square(Trace):
    low_w: float
    high_w: float
    period_s: float
    duty: float = 0.5
    phase_s: float = 0.0

    def power_w(self, time_s: float) -> float:
        return self.high_w if (time_s + self.phase_s) % self.period_s < self.duty * self.period_s else self.low_w

    def _on_s(self, time_s: float) -> float:
        whole, rest = divmod(time_s + self.phase_s, self.period_s)
        return whole * self.duty * self.period_s + min(rest, self.duty * self.period_s)

    def energy_j(self, time_s: float) -> float:
        return self.low_w * time_s + (self.high_w - self.low_w) * (self._on_s(time_s) - self._on_s(0.0))


@dataclass(frozen=True)
class Sine(Trace):
    mean_w: float
    swing_w: float
    period_s: float
    phase: float = 0.0

    def power_w(self, time_s: float) -> float:
        return self.mean_w + self.swing_w * math.sin(2 * math.pi * time_s / self.period_s + self.phase)

    def energy_j(self, time_s: float) -> float:
        rate = 2 * math.pi / self.period_s
        return self.mean_w * time_s + self.swing_w / rate * (
            math.cos(self.phase) - math.cos(rate * time_s + self.phase)
        )


class Points(Trace):
    """Power given at moments: held until the next (``linear=False``) or joined by straight lines."""

    def __init__(self, times: Sequence[float], powers: Sequence[float], *, linear: bool = False) -> None:
        self.times, self.powers, self.linear = list(times), list(powers), linear
        self.sums = [0.0]
        for i in range(len(self.times) - 1):
            mean = 0.5 * (self.powers[i] + self.powers[i + 1]) if linear else self.powers[i]
            self.sums.append(self.sums[-1] + mean * (self.times[i + 1] - self.times[i]))

    def power_w(self, time_s: float) -> float:
        i = max(0, bisect_right(self.times, time_s) - 1)
        if not self.linear or i + 1 == len(self.times):
            return self.powers[i]
        x = (time_s - self.times[i]) / (self.times[i + 1] - self.times[i])
        return self.powers[i] + x * (self.powers[i + 1] - self.powers[i])

    def energy_j(self, time_s: float) -> float:
        i = max(0, bisect_right(self.times, time_s) - 1)
        ahead = time_s - self.times[i]
        mean = 0.5 * (self.powers[i] + self.power_w(time_s)) if self.linear else self.powers[i]
        return self.sums[i] + mean * ahead


def constant(power_w: float) -> Trace:
    return Points([-1e9, 1e9], [power_w, power_w])


def telegraph(low_w: float, high_w: float, mean_s: float, until_s: float, rng: random.Random) -> Trace:
    times, powers, now = [-10.0], [low_w], 0.0
    while now < until_s:
        times.append(now)
        powers.append(high_w if powers[-1] == low_w else low_w)
        now += rng.expovariate(1 / mean_s)
    return Points(times, powers)


def ramp(low_w: float, high_w: float, seconds: float) -> Trace:
    return Points([-10.0, 0.0, seconds, 1e6], [low_w, low_w, high_w, high_w], linear=True)


@dataclass(frozen=True)
class Model:
    """What a sensor does.

    Attributes:
        update_s: time between two updates of the power reading.
        average_s: the power reading is the mean over so much time before its update; 0: instantaneous.
        counter_s: time between two updates of the energy counter; None: it has none.
        part_time: whether the counter adds up its power readings instead of the truth.
        noise_w: standard deviation added to each power reading.
        told_s: averaging time that the board admits to.
    """

    name: str
    update_s: float
    average_s: float
    counter_s: float | None = None
    part_time: bool = False
    noise_w: float = 0.0
    told_s: float = 0.0
    npu: bool = False


MODELS = {
    model.name: model
    for model in (
        Model("a100", 0.1, 0.025, 0.1),
        Model("a100s", 0.1, 0.025, 0.1, part_time=True),
        Model("v100", 0.02, 0.02, 0.02),
        Model("hopper", 0.1, 1.0, 0.1, told_s=1.0),
        Model("pascal", 0.02, 0.02),
        Model("pascaln", 0.02, 0.02, noise_w=0.5),
        Model("npu", 0.1, 0.0, npu=True),
        Model("npun", 0.1, 0.0, noise_w=0.2, npu=True),
        Model("npu1s", 1.0, 0.0, npu=True),
        Model("npu1sn", 1.0, 0.0, noise_w=0.2, npu=True),
    )
}


class Sensor:
    """A model over a trace.

    Args:
        model: the model.
        trace: the truth.
        rng: draws the phase of the updates, noise and irregularity.
        skew: the update period is off by a share drawn from +-skew.
        jitter_s: each update is off its grid by so much at most.
        counter_zero_j: where the counter starts.
    """

    def __init__(
        self,
        model: Model,
        trace: Trace,
        rng: random.Random,
        *,
        until_s: float,
        skew: float = 0.0,
        jitter_s: float = 0.0,
        counter_zero_j: float = 1234.5,
    ) -> None:
        self.model, self.trace = model, trace
        factor = 1.0 + rng.uniform(-skew, skew)

        def grid(step_s: float) -> list[float]:
            first = rng.uniform(-2 * step_s, -step_s)
            count = int((until_s - first) / (step_s * factor)) + 3
            return [first + k * step_s * factor + rng.uniform(-jitter_s, jitter_s) for k in range(count)]

        self.power_ticks = grid(model.update_s)
        self.powers = [self._sample(tick, rng) for tick in self.power_ticks]
        self.counter_ticks: list[float] = []
        self.counts: list[float] = []
        if model.counter_s is not None:
            shared = model.counter_s == model.update_s  # one refresh loop serves both
            self.counter_ticks = self.power_ticks if shared else grid(model.counter_s)
            if model.part_time:
                total = counter_zero_j
                for k, tick in enumerate(self.counter_ticks):
                    before = self.counter_ticks[k - 1] if k else tick - model.counter_s
                    total += self._sample(tick, rng) * (tick - before)
                    self.counts.append(total)
            else:
                self.counts = [counter_zero_j + trace.energy_j(tick) for tick in self.counter_ticks]

    def _sample(self, tick: float, rng: random.Random) -> float:
        average = self.model.average_s
        exact = self.trace.power_w(tick)
        if average > 0:
            exact = (self.trace.energy_j(tick) - self.trace.energy_j(tick - average)) / average
        return max(0.0, exact + (rng.gauss(0.0, self.model.noise_w) if self.model.noise_w else 0.0))

    def power_w(self, time_s: float) -> float:
        return round(self.powers[max(0, bisect_right(self.power_ticks, time_s) - 1)], 3)

    def counter_j(self, time_s: float) -> float | None:
        if not self.counts:
            return None
        return round(self.counts[max(0, bisect_right(self.counter_ticks, time_s) - 1)], 3)

    def read(self, time_s: float, *, power: bool = True) -> Reading:
        return Reading(time_s, self.power_w(time_s) if power else None, self.counter_j(time_s))

    @property
    def board(self) -> Board:
        kind = "npu" if self.model.npu else "gpu"
        return Board("host/board", kind, self.model.name, 0, bool(self.counts), 500.0, averaging_s=self.model.told_s)


def poll_times(
    until_s: float, poll_s: float, rng: random.Random, *, jitter: float = 0.25, probe_s: float = 2.0
) -> list[float]:
    """Times of the polls: fast ones at first, which find the update periods, then jittered ones."""
    times, now = [], 0.0
    while now < until_s:
        times.append(now)
        now += rng.uniform(0.005, 0.01) if now < probe_s else poll_s * rng.uniform(1 - jitter, 1 + jitter)
    return times


@dataclass
class Result:
    truth_j: float
    ours: BoardEnergy
    peers_j: dict[str, float]

    @property
    def error_j(self) -> float:
        return self.ours.energy_j - self.truth_j


@dataclass
class Cell:
    results: list[Result] = field(default_factory=list)

    def mean_percent(self, peer: str | None = None) -> float:
        errors = [
            abs((r.peers_j[peer] if peer else r.ours.energy_j) - r.truth_j) / max(r.truth_j, 1e-9) for r in self.results
        ]
        return 100 * statistics.fmean(errors)

    @property
    def coverage_percent(self) -> float:
        """Share of windows whose truth lies within the stated uncertainty, less its gain part."""
        within = [abs(r.error_j) <= r.ours.uncertainty_j - r.ours.gain_j + 1e-3 for r in self.results]
        return 100 * statistics.fmean(within)

    @property
    def ratio(self) -> float:
        """Median uncertainty, less the gain part, over median error."""
        errors = statistics.median(abs(r.error_j) for r in self.results)
        return statistics.median(r.ours.resolution_j + r.ours.gap_j for r in self.results) / max(errors, 1e-9)


def trapezoid_j(readings: Sequence[Reading], t0_s: float, t1_s: float) -> float:
    """Plain trapezoid over the readings as they came, interpolated at the window's ends."""
    points = [(r.time_s, r.power_w) for r in readings if r.power_w is not None]
    times = [t for t, _ in points]
    inner = points[bisect_right(times, t0_s) : bisect_right(times, t1_s)]

    def at(time_s: float) -> float:
        i = min(max(bisect_right(times, time_s), 1), len(points) - 1)
        (ta, pa), (tb, pb) = points[i - 1], points[i]
        return pa + (pb - pa) * (time_s - ta) / (tb - ta)

    line = [(t0_s, at(t0_s)), *inner, (t1_s, at(t1_s))]
    return sum(0.5 * (pa + pb) * (tb - ta) for (ta, pa), (tb, pb) in itertools.pairwise(line))


def mean_j(readings: Sequence[Reading], t0_s: float, t1_s: float) -> float:
    """Mean of the power readings inside the window, times its length; the nearest one if there is none."""
    points = [(r.time_s, r.power_w) for r in readings if r.power_w is not None]
    times = [t for t, _ in points]
    first, end = bisect_right(times, t0_s), bisect_right(times, t1_s)
    inner = [power for _, power in points[first:end]] or [points[max(0, first - 1)][1]]
    return statistics.fmean(inner) * (t1_s - t0_s)


def simulate(
    sensor: Sensor,
    *,
    rng: random.Random,
    windows: int,
    lengths_s: Iterable[float] = LENGTHS_S,
    until_s: float = 60.0,
    poll_s: float = 0.05,
    probe_s: float = 2.0,
    edge_power: bool | None = None,
) -> dict[float, list[Result]]:
    """Run ``windows`` windows of each length at random moments; edges are read in between the polls."""
    has_counter = bool(sensor.counts)
    edge_power = not has_counter if edge_power is None else edge_power
    spans = [
        (length, begin)
        for length in lengths_s
        for begin in (rng.uniform(4.0, until_s - length - 4.0) for _ in range(windows))
    ]
    edges = {time_s for length, begin in spans for time_s in (begin, begin + length)}
    moments = sorted(
        {(t, True) for t in poll_times(until_s, poll_s, rng, probe_s=probe_s)} | {(t, False) for t in edges}
    )
    readings = [sensor.read(t, power=polled or edge_power) for t, polled in moments]
    curve = BoardCurve(sensor.board, poll_s=poll_s, gain=0.0)
    for reading in readings:
        curve.add(reading)
    results: dict[float, list[Result]] = {}
    for length, t0_s in spans:
        t1_s = t0_s + length
        ours = curve.energy(t0_s, t1_s)
        if ours is None:
            raise AssertionError("nothing known of a window inside the run")
        peers = {"trapezoid": trapezoid_j(readings, t0_s, t1_s), "mean": mean_j(readings, t0_s, t1_s)}
        if has_counter:
            peers["raw"] = (sensor.counter_j(t1_s) or 0.0) - (sensor.counter_j(t0_s) or 0.0)
        truth = sensor.trace.energy_j(t1_s) - sensor.trace.energy_j(t0_s)
        results.setdefault(length, []).append(Result(truth, ours, peers))
    return results


LoadMaker = Callable[[random.Random, bool], Trace]


def square_loads(periods_s: Sequence[float], duties: Sequence[float] = DUTIES) -> list[LoadMaker]:
    def make(period_s: float, duty: float) -> LoadMaker:
        return lambda rng, npu: Square(*_levels(npu), period_s, duty, rng.uniform(0, period_s))

    return [make(period_s, duty) for period_s in periods_s for duty in duties]


def _levels(npu: bool) -> tuple[float, float]:
    return (8.0, 25.0) if npu else (50.0, 180.0)


OTHER_LOADS: dict[str, LoadMaker] = {
    "sine": lambda rng, npu: Sine(
        sum(_levels(npu)) / 2, (_levels(npu)[1] - _levels(npu)[0]) / 2, rng.uniform(0.3, 3.0), rng.uniform(0, 6)
    ),
    "telegraph": lambda rng, npu: telegraph(*_levels(npu), rng.uniform(0.2, 1.0), 80.0, rng),
    "ramp": lambda rng, npu: ramp(*_levels(npu), 60.0),
    "constant": lambda rng, npu: constant(_levels(npu)[1]),
}


def table(
    loads: Sequence[LoadMaker],
    *,
    models: Iterable[str] = MODELS,
    windows: int = 12,
    seed: int = 1,
    skew: float = 0.005,
    jitter_s: float = 0.0005,
    poll_s: float = 0.05,
    probe_s: float = 2.0,
) -> dict[tuple[str, float], Cell]:
    """Simulate every model over every load; cells by model and window length."""
    cells: dict[tuple[str, float], Cell] = {}
    for name in models:
        model = MODELS[name]
        for index, make in enumerate(loads):
            rng = random.Random(f"{seed}/{name}/{index}")
            trace = make(rng, model.npu)
            sensor = Sensor(model, trace, rng, until_s=62.0, skew=skew, jitter_s=jitter_s)
            found = simulate(sensor, rng=rng, windows=windows, poll_s=poll_s, probe_s=probe_s)
            for length, results in found.items():
                cells.setdefault((name, length), Cell()).results.extend(results)
    return cells


def show(cells: dict[tuple[str, float], Cell]) -> str:
    head = "model    window     n  mean err      raw  trapez.     mean   within  ratio"
    lines = [head]
    for (name, length), cell in cells.items():
        has_raw = "raw" in cell.results[0].peers_j
        raw = f"{cell.mean_percent('raw'):7.2f}%" if has_raw else "       -"
        lines.append(
            f"{name:8} {length:5.1f}s {len(cell.results):5d} {cell.mean_percent():8.3f}% {raw} "
            f"{cell.mean_percent('trapezoid'):7.2f}% {cell.mean_percent('mean'):7.2f}% "
            f"{cell.coverage_percent:7.2f}% {cell.ratio:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true", help="periods and seeds that nothing was tuned on")
    parser.add_argument("--ideal", action="store_true", help="sensors whose refresh is exactly regular")
    parser.add_argument("--other", action="store_true", help="sine, random telegraph, ramp and constant loads, each")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--windows", type=int, default=12, help="per load and length")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--no-probe", action="store_true", help="no fast readings at the start")
    parser.add_argument("--poll", type=float, default=0.05)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else 2 if options.held_out else 1
    settings = {
        "models": options.models,
        "windows": options.windows,
        "seed": seed,
        "poll_s": options.poll,
        "probe_s": 0.0 if options.no_probe else 2.0,
        **({"skew": 0.0, "jitter_s": 0.0} if options.ideal else {}),
    }
    if options.other:
        for name, make in OTHER_LOADS.items():
            print(f"\n{name}\n{show(table([make] * 8, **settings))}")
    else:
        print(show(table(square_loads(HELD_OUT_S if options.held_out else PERIODS_S), **settings)))


if __name__ == "__main__":
    main()
