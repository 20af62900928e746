"""Integrated power: updates of a gauge count once each, however polls fell; slow gauges know how little they see."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from power_simulation import square_loads, table

from lightning_npu.power.integral import PowerIntegral
from lightning_npu.power.series import Span

PERIOD_S = 0.1


def integral(period_s: float | None = PERIOD_S) -> PowerIntegral:
    """One that knows its gauge's update period."""
    made = PowerIntegral(0.0, 1.0, usual_s=0.0, age=0.5)
    made.updates.period_s = made.updates.bound_s = period_s
    made.updates.change = lambda *_: None  # type: ignore[method-assign]  # what it measures is tested elsewhere
    return made


def held(values: list[float], time_s: float) -> float:
    """What a gauge shows that takes the next of ``values`` every PERIOD_S."""
    return values[min(int(time_s / PERIOD_S), len(values) - 1)]


def feed(made: PowerIntegral, values: list[float], polls: list[float]) -> list[Span]:
    return [span for time_s in polls for span in made.add(time_s, held(values, time_s))]


def power_w(spans: list[Span], begin_s: float, time_s: float) -> float:
    ends = [begin_s, *(span.time_s for span in spans)]
    index = bisect_right(ends, time_s)
    return spans[index - 1].energy_j / (ends[index] - ends[index - 1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_an_update_counts_once_however_many_polls_saw_it(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.uniform(8.0, 25.0) for _ in range(400)]
    polls = [0.0]
    while polls[-1] < 39.5:
        polls.append(polls[-1] + rng.uniform(0.012, 0.07))
    spans = feed(integral(), values, polls)
    energy = sum(span.energy_j for span in spans)
    ticks = [PERIOD_S * k for k in range(len(values))]

    def area_j(until_s: float) -> float:
        k = int(until_s / PERIOD_S)
        whole = sum(0.5 * PERIOD_S * (a + b) for a, b in itertools.pairwise(values[: k + 1]))
        share = (until_s - ticks[k]) / PERIOD_S
        return whole + share * PERIOD_S * (values[k] + 0.5 * share * (values[k + 1] - values[k]))

    # what is left is that an update's moment is known to the poll after it only
    assert energy == pytest.approx(area_j(spans[-1].time_s), rel=0.01)


def test_polls_that_crowd_on_one_value_do_not_make_it_heavier() -> None:
    values = [10.0, 20.0] * 50
    seen_at = [[0.01 * x for x in range(1, 9)], [0.01, 0.08]]  # eight polls of each low value, two of each high one
    polls = [PERIOD_S * k + x for k in range(100) for x in seen_at[k % 2]]
    spans = feed(integral(), values, polls)
    energy, seconds = sum(span.energy_j for span in spans), spans[-1].time_s - polls[0]
    assert energy / seconds == pytest.approx(15.0, rel=0.01)


def test_between_two_updates_the_first_holds_then_the_mean_then_the_last() -> None:
    spans = feed(integral(), [10.0, 10.0, 30.0, 30.0], [0.0, 0.06, 0.12, 0.18, 0.24, 0.3, 0.36])
    begin_s, end_s = 0.1, 0.21
    length = end_s - begin_s
    assert power_w(spans, 0.0, begin_s + 0.2 * length) == pytest.approx(10.0)
    assert power_w(spans, 0.0, begin_s + 0.5 * length) == pytest.approx(20.0)
    assert power_w(spans, 0.0, end_s - 0.2 * length) == pytest.approx(30.0)


def test_what_the_last_fast_poll_saw_counts_until_then() -> None:
    made = integral()
    spans = [span for time_s in (0.0, 0.05, 0.1, 0.13) for span in made.add(time_s, 10.0)]
    spans += made.add(0.43, 50.0)  # too late to tell when the value changed
    before = [span for span in spans if span.time_s <= 0.13 - made.lag_s + 1e-9]
    # the first reading belongs to half a period before time 0
    assert sum(span.energy_j for span in before) == pytest.approx(10.0 * 0.13)
    assert spans[-1].energy_j == pytest.approx(30.0 * (0.43 - 0.13))


def test_an_update_that_changed_nothing_is_laid_when_the_next_is_due() -> None:
    made = integral()
    spans = [span for k in range(200) for span in made.add(0.05 * k, 12.0)]
    assert 80 <= len(spans) <= 110  # one per update, not one per poll
    assert spans[-1].time_s >= 0.05 * 199 - 2.0 * PERIOD_S
    assert sum(span.energy_j for span in spans) == pytest.approx(12.0 * (spans[-1].time_s + made.lag_s), rel=0.01)
    assert all(a.time_s < b.time_s for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("name", ["npun", "npu1sn"])
def test_gauges_that_polls_can_tell_are_better_than_their_polls(name: str) -> None:
    cell = table(square_loads([0.17, 0.45, 1.1, 1.9]), models=[name], windows=15, seed=22)[name, 1.0]
    assert cell.mean_percent() <= 0.92 * min(cell.mean_percent("trapezoid"), cell.mean_percent("mean"))
    assert cell.coverage_percent >= 98.0


@pytest.mark.parametrize("period_s", [0.511, 0.7])
def test_a_gauge_of_a_second_says_that_a_fast_load_may_hide_behind_a_slow_change(period_s: float) -> None:
    cells = table(square_loads([period_s]), models=["npu1sn"], windows=30, seed=23)
    for (_, length), cell in cells.items():
        assert cell.coverage_percent >= 80.0, length
