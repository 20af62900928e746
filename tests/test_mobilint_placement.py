"""Which device and which cores a rank takes: nobody takes another's, nothing is left over, too many are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_npu as npu
from lightning_npu.runtimes.mobilint.cores import UNITS, CorePlan, plan_cores
from lightning_npu.runtimes.mobilint.placement import Place, choose, local_ranks


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (1, 4)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, (1, 4)),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),  # Lightning's own launcher
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "8", "NODE_RANK": "1"}, (1, 8)),  # an upper bound
        ({"LOCAL_RANK": "3"}, (3, 4)),
        ({"SLURM_LOCALID": "2", "SLURM_NTASKS_PER_NODE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (0, 2)),
        ({"LOCAL_RANK": "x"}, (0, 1)),
    ],
)
def test_ranks_are_read_as_launchers_write_them(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert local_ranks(environment) == expected


@given(
    devices=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    ranks=st.integers(1, 24),
    mode=st.sampled_from(sorted(UNITS)),
)
def test_ranks_share_all_cores_and_none_twice(devices: list[int], ranks: int, mode: str) -> None:
    devices = sorted(devices)
    taken: dict[int, list[int]] = {number: [] for number in devices}
    refused = 0
    for rank in range(ranks):
        place = choose(devices, None, None, (rank, ranks))
        try:
            plan = plan_cores("all", mode, place)
        except npu.RuntimeUnavailableError:
            refused += 1
            continue
        assert plan.slots >= 1
        taken[place.number] += plan.units
    room = len(devices) * UNITS[mode]
    assert (refused > 0) == (ranks > room)
    for units in taken.values():
        assert len(units) == len(set(units))
        if units and not refused:
            assert sorted(units) == list(range(UNITS[mode]))


@pytest.mark.parametrize(("mode", "count"), UNITS.items())
def test_more_ranks_than_fit_are_refused(mode: str, count: int) -> None:
    with pytest.raises(
        npu.RuntimeUnavailableError,
        match=rf"{count + 1} ranks share Mobilint device 3(.|\n)*at most {count} rank(.|\n)*Got: {count + 1} ranks",
    ):
        plan_cores("all", mode, Place(3, 0, count + 1))


def test_a_chosen_device_is_shared_by_all_ranks_of_the_host_unless_said_otherwise() -> None:
    assert choose([0, 1], 1, None, (1, 2)) == Place(1, 1, 2)
    assert choose([0, 1], 1, 1, (1, 2)) == Place(1, 0, 1)
    assert choose([0, 1], None, None, (1, 2)) == Place(1, 0, 1)
    assert choose([0, 1], None, None, (2, 3)) == Place(0, 1, 2)
    with pytest.raises(npu.RuntimeUnavailableError, match=r"no Mobilint device 5(.|\n)*one of \[0, 1\]"):
        choose([0, 1], 5, None, (0, 1))
    with pytest.raises(npu.RuntimeUnavailableError, match=r"finds no ARIES device"):
        choose([], None, None, (0, 1))
    with pytest.raises(
        npu.RuntimeUnavailableError, match=r"Rank 2 of this host has no place(.|\n)*1 ranks on each of 2"
    ):
        choose([0, 1], None, 1, (2, 3))


def test_who_has_a_device_alone_lets_the_mxq_choose() -> None:
    assert plan_cores("single", None, Place(0)) == CorePlan("single", tuple(range(8)), auto=True)
    assert not plan_cores("single", "single", Place(0)).auto
    assert not plan_cores("all", None, Place(0)).auto  # the vendor cannot choose among several modes
    assert plan_cores("single", None, Place(0, 1, 2)) == CorePlan("single", (4, 5, 6, 7), shared=True)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (CorePlan("single", (4, 5, 6, 7)), "single, cores 4-7"),
        (CorePlan("single", (2,)), "single, core 2"),
        (CorePlan("global4", (1,)), "global4, cluster 1"),
        (CorePlan("global8", (0,)), "global8, all cores"),
    ],
)
def test_plans_in_words(plan: CorePlan, words: str) -> None:
    assert plan.describe() == words
