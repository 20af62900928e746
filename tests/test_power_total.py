"""Sums over boards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_npu.errors import InputError
from lightning_npu.power.base import BoardEnergy
from lightning_npu.power.total import combine

ONE = BoardEnergy(
    energy_j=100.0,
    uncertainty_j=5.0 + 3.0 + 6.0,
    gain_j=5.0,
    resolution_j=3.0,
    gap_j=6.0,
    coverage=1.0,
    duration_s=2.0,
    max_power_w=60.0,
    method="counter",
    state="ok",
    settled=True,
)
OTHER = replace(ONE, energy_j=10.0, gain_j=1.0, resolution_j=4.0, gap_j=8.0, coverage=0.5, max_power_w=8.0)


def test_gains_add_linearly_and_the_rest_as_root_of_squares() -> None:
    total = combine({"a": ONE, "b": OTHER})
    assert (total.energy_j, total.gain_j, total.resolution_j, total.gap_j) == (110.0, 6.0, 5.0, 10.0)
    assert total.uncertainty_j == 21.0
    assert (total.coverage, total.max_power_w, total.duration_s) == (0.5, 68.0, 2.0)
    assert total.mean_power_w == 55.0


def test_one_board_is_itself() -> None:
    assert combine({"a": ONE}) == ONE


def test_worst_state_wins_and_says_whose_it_is() -> None:
    degraded, lost = replace(ONE, state="degraded: no counter"), replace(ONE, state="lost: gone")
    assert combine({"a": ONE, "b": degraded}).state == "degraded: b: no counter"
    assert combine({"a": degraded, "b": lost, "c": ONE}).state == "lost: b: gone"
    assert combine({"a": ONE, "b": ONE}).state == "ok"


def test_method_peak_and_settledness() -> None:
    assert combine({"a": ONE, "b": replace(OTHER, method="power")}).method == "mixed"
    assert combine({"a": ONE, "b": OTHER}).method == "counter"
    assert combine({"a": ONE, "b": replace(OTHER, max_power_w=None)}).max_power_w is None
    assert not combine({"a": ONE, "b": replace(OTHER, settled=False)}).settled


def test_sum_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="not 0 J"):
        combine({})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_sum_is_no_more_certain_than_its_worst_board_and_no_worse_than_all(parts: list[float]) -> None:
    total = combine({str(i): replace(ONE, gain_j=0.0, resolution_j=part, gap_j=0.0) for i, part in enumerate(parts)})
    assert max(parts) * (1 - 1e-9) <= total.resolution_j <= sum(parts) * (1 + 1e-9)
