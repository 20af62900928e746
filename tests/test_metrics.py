from __future__ import annotations

import copy
import doctest
import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_npu as npu
from lightning_npu.compile.fidelity import LIMIT_DB, compare
from lightning_npu.errors import InputError
from lightning_npu.metrics import base, energy, fidelity, overlap
from lightning_npu.metrics.energy import board_hash
from lightning_npu.power.base import BoardEnergy
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource

MERGES = hasattr(npu.metrics.EnergyPerSample, "merge_state")
needs_merge = pytest.mark.skipif(not MERGES, reason="this torchmetrics has no merge_state")
GPU, NPU = "node7/GPU-8f2c", "node7/aries-0"


def board_energy(joules: float, duration_s: float, coverage: float = 1.0) -> BoardEnergy:
    return BoardEnergy(joules, 0, 0, 0, 0, coverage, duration_s, None, "counter", "ok", True)


@pytest.mark.parametrize("module", [npu.metrics, energy, overlap, fidelity, base], ids=lambda module: module.__name__)
def test_examples_in_the_docs_are_true(module):
    flags = doctest.NORMALIZE_WHITESPACE
    failed, attempted = doctest.testmod(module, optionflags=flags, extraglobs={"torch": torch})
    assert not failed
    assert attempted or module is base


# --- joules per sample


def test_joules_of_distinct_boards_add_up():
    metric = npu.metrics.EnergyPerSample()
    metric.update({GPU: 90.0, NPU: 10.0}, 40)
    metric.update({GPU: board_energy(60.0, 3.0), NPU: 0.0}, 0)
    assert metric.compute() == 4.0
    metric.reset()
    metric.update({GPU: 1.0}, 2)
    assert metric.compute() == 0.5


@pytest.mark.parametrize("value", [None, math.nan, math.inf, board_energy(math.nan, 1.0)])
def test_unknown_energy_is_not_a_number_and_never_zero(value):
    assert math.isnan(npu.metrics.energy_per_sample({GPU: 5.0, NPU: value}, 10))
    metric = npu.metrics.EnergyPerSample()
    metric.update({GPU: 5.0, NPU: value}, 10)
    metric.update({GPU: 5.0, NPU: 1.0}, 10)
    assert metric.compute().isnan()


@pytest.mark.parametrize("unknown", [None, SimpleNamespace(by_board={}, energy_j=None)])
@pytest.mark.parametrize("unknown_first", [True, False])
def test_a_span_that_nobody_read_makes_the_total_unknown(unknown, unknown_first):
    metric = npu.metrics.EnergyPerSample()
    for span in (unknown, {GPU: 5.0}) if unknown_first else ({GPU: 5.0}, unknown):
        metric.update(span, 10)
    assert metric.compute().isnan()


def test_no_board_and_no_samples():
    for spans in ([], [({}, 5)], [(None, 5)], [({GPU: 5.0}, 0)]):
        metric = npu.metrics.EnergyPerSample()
        metric._update_count = 1  # spares the warning of a compute without update
        for span, samples in spans:
            metric.update(span, samples)
            assert math.isnan(npu.metrics.energy_per_sample(span, samples))
        assert metric.compute().isnan()


def test_a_window_of_the_monitor_is_understood():
    window = SimpleNamespace(by_board={GPU: board_energy(30.0, 2.0), NPU: board_energy(10.0, 2.0)}, energy_j=40.0)
    assert npu.metrics.energy_per_sample(window, 20) == 2.0
    metric = npu.metrics.EnergyPerSample()
    assert metric(window, 20) == 2.0


def test_a_board_that_a_window_misses_makes_the_total_unknown():
    window = SimpleNamespace(by_board={GPU: board_energy(30.0, 2.0)}, missing={NPU: "lost: gone"}, energy_j=30.0)
    assert math.isnan(npu.metrics.energy_per_sample(window, 20))
    metric = npu.metrics.EnergyPerSample()
    metric.update(window, 20)
    assert metric.compute().isnan()


def test_windows_of_a_real_monitor():
    boards = [SimulatedBoard(100.0, "gpu", kind="gpu", counter=True), SimulatedBoard(8.0, "npu", kind="npu")]
    metric, windows = npu.metrics.EnergyPerSample(), []
    with npu.power.EnergyMonitor([SimulatedSource(boards)], interval_s=0.01) as monitor:
        for _ in range(2):
            with monitor.window() as window:
                while window.duration_s < 0.5:
                    torch.randn(200, 200) @ torch.randn(200, 200)
            assert window.settle(30)
            metric.update(window, 4)
            windows.append(window)
    truth_j = 108 * sum(window.duration_s for window in windows)
    allowed_j = sum(window.uncertainty_j for window in windows)
    assert abs(metric.compute().item() * 8 - truth_j) <= allowed_j < truth_j / 2


def test_forward_gives_the_batch_and_keeps_the_total():
    metric = npu.metrics.EnergyPerSample()
    assert metric({GPU: 4.0}, 2) == 2.0
    assert metric({GPU: 2.0}, 4) == 0.5
    assert metric.compute() == 1.0


@needs_merge
def test_merging_metrics_of_one_process_adds_up():
    first, second = npu.metrics.EnergyPerSample(), npu.metrics.EnergyPerSample()
    first.update({GPU: 4.0, NPU: 1.0}, 2)
    second.update({GPU: 5.0}, 3)
    first.merge_state(second)
    assert first.compute() == 2.0
    assert second.compute() == pytest.approx(5 / 3)


@needs_merge
def test_merging_metrics_of_two_processes_counts_a_board_once(monkeypatch):
    metrics = []
    for writer, joules, seconds in ((1, 50.0, 5.0), (2, 98.0, 10.0), (3, 60.0, 6.0)):
        monkeypatch.setattr(base, "_identity", (base.os.getpid(), writer))
        metrics.append(npu.metrics.EnergyPerSample())
        metrics[-1].update({GPU: board_energy(joules, seconds)}, 7)
    metrics[0].merge_state(metrics[1])
    metrics[0].merge_state(metrics[2])
    assert metrics[0].compute() == pytest.approx(98 / 21)


@needs_merge
def test_coverage_decides_not_duration(monkeypatch):
    first, second = npu.metrics.EnergyPerSample(), npu.metrics.EnergyPerSample()
    first.update({GPU: board_energy(100.0, 10.0, coverage=0.3)}, 1)
    monkeypatch.setattr(base, "_identity", (base.os.getpid(), 2))
    second.update({GPU: board_energy(90.0, 9.0, coverage=0.9)}, 1)
    first.merge_state(second)
    assert first.compute() == 45


@needs_merge
@pytest.mark.parametrize("known_first", [True, False])
def test_of_equal_coverage_the_known_figure_counts(known_first, monkeypatch):
    values = [7.0, None] if known_first else [None, 7.0]
    metrics = []
    for writer, value in enumerate(values, 1):
        monkeypatch.setattr(base, "_identity", (base.os.getpid(), writer))
        metrics.append(npu.metrics.EnergyPerSample())
        metrics[-1].update({GPU: value}, 1)
    metrics[0].merge_state(metrics[1])
    assert metrics[0].compute() == 3.5


def test_many_small_updates_lose_nothing():
    metric = npu.metrics.EnergyPerSample()
    for _ in range(20_000):
        metric.update({GPU: 0.1, NPU: 1e-7}, 1)
    metric.update({GPU: 1e6}, 0)
    assert metric.compute().item() == pytest.approx((2000 + 2e-3 + 1e6) / 20_000, rel=1e-14)
    assert len(metric.ids) <= 65


@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6)), st.integers(0, 1000)),
        min_size=1,
        max_size=30,
    )
)
@settings(deadline=None, max_examples=50)
def test_any_sequence_agrees_with_the_pure_function(updates):
    metric = npu.metrics.EnergyPerSample()
    total: dict[str, float] = {}
    for boards, samples in updates:
        metric.update(boards, samples)
        for key, joules in boards.items():
            total[key] = total.get(key, 0.0) + joules
    expected = npu.metrics.energy_per_sample(total, sum(samples for _, samples in updates))
    assert metric.compute().item() == pytest.approx(expected, rel=1e-9, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.set_dtype(torch.half)]
)
def test_casts_do_not_degrade_it(move):
    metric = npu.metrics.EnergyPerSample()
    metric.update({GPU: 1234567.891}, 1)
    metric.compute()
    move(metric)
    metric.update({GPU: 0.001}, 0)
    assert metric.compute().item() == pytest.approx(1234567.892, rel=1e-14)
    assert metric.compute().dtype is torch.float64


def test_copies_and_pickles_are_independent_and_equal():
    metric = npu.metrics.EnergyPerSample()
    metric.update({GPU: 8.0}, 2)
    for other in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), metric.clone()):
        assert other.compute() == 4.0
        other.update({GPU: 8.0}, 0)
        assert other.compute() == 8.0
    assert metric.compute() == 4.0


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_a_resumed_run_goes_on_counting(tmp_path, monkeypatch):
    metric = npu.metrics.EnergyPerSample()
    assert metric.state_dict() == {}, "as with every metric, by default"
    metric.persistent(True)
    metric.update({GPU: board_energy(100.0, 10.0), NPU: 10.0}, 50)
    torch.save(metric.state_dict(), tmp_path / "state.pt")
    monkeypatch.setattr(base, "_identity", (base.os.getpid(), 99))  # as after a restart
    resumed = npu.metrics.EnergyPerSample()
    resumed.persistent(True)
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(loaded)
    assert resumed.compute() == 2.2
    resumed.update({GPU: board_energy(20.0, 2.0)}, 15)
    assert resumed.compute() == 2.0
    assert loaded["ids"][0].shape == metric.ids[0].shape, "the caller's dict must stay as it was"
    again = npu.metrics.EnergyPerSample()
    again.load_state_dict(resumed.state_dict())
    assert again.compute() == 2.0


def test_a_past_without_readings_stays_unknown():
    metric = npu.metrics.EnergyPerSample()
    metric.persistent(True)
    metric.update(None, 50)
    resumed = npu.metrics.EnergyPerSample()
    resumed.load_state_dict(metric.state_dict())
    resumed.update({GPU: 5.0}, 5)
    assert resumed.compute().isnan()


def test_loading_nothing_changes_nothing():
    metric = npu.metrics.EnergyPerSample()
    metric.update({GPU: 8.0}, 2)
    metric.load_state_dict({})
    metric.update({GPU: 8.0}, 2)
    assert metric.compute() == 4.0


def test_messages_of_refused_updates():
    metric = npu.metrics.EnergyPerSample()
    with pytest.raises(InputError, match="which board") as error:
        metric.update(12.5, 3)
    assert "{board.key: joules}" in str(error.value)
    with pytest.raises(InputError, match=r"keys \[0\]"):
        metric.update({0: 12.5}, 3)
    for bad in (-1, 2.5):
        with pytest.raises(InputError, match="0 or more"):
            metric.update({GPU: 1.0}, bad)


def test_board_hashes_are_fixed_and_distinct():
    assert board_hash(GPU) == board_hash(GPU) != board_hash(NPU)
    hashes = {board_hash(f"node{n}/GPU-{k}") for n in range(100) for k in range(100)}
    assert len(hashes) == 10_000
    assert 0 not in hashes
    assert all(-(2**63) <= value < 2**63 for value in hashes)
    assert board_hash("node7/GPU-8f2c") == -7817598766127934579


class Metered(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.energy = npu.metrics.EnergyPerSample()
        self.fidelity = npu.metrics.FeatureFidelity(figure="sqnr_db")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.energy.update({GPU: 10.0 * (batch_idx + 1)}, len(batch))
        self.log("joules_per_sample", self.energy, on_step=False, on_epoch=True)
        self.fidelity(1.1 * batch, batch)
        self.log("sqnr_db", self.fidelity, on_step=True, on_epoch=True)
        return self.layer(batch).sum()


def test_lightning_logs_the_metric_objects(tmp_path):
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Metered()
    trainer.fit(model)
    assert trainer.callback_metrics["joules_per_sample"] == 25.0, "the second epoch starts anew"
    assert trainer.callback_metrics["sqnr_db_epoch"].item() == pytest.approx(20, abs=1e-4)


# --- overlap


@given(*[st.floats(1e-6, 10)] * 3)
def test_overlap_is_the_slower_device_over_the_step(step_s, train_s, npu_s):
    assert npu.metrics.overlap_efficiency(step_s, train_s, npu_s) == max(train_s, npu_s) / step_s
    metric = npu.metrics.OverlapEfficiency()
    metric.update(step_s, train_s=train_s, npu_s=npu_s)
    assert metric.compute().item() == pytest.approx(max(train_s, npu_s) / step_s)


def test_overlap_averages_each_time_by_itself():
    metric = npu.metrics.OverlapEfficiency()
    metric.update(train_s=0.03, npu_s=0.01, steps=10)
    metric.update(train_s=0.06, steps=5)
    assert metric.compute().isnan()
    metric.update(0.05, steps=2)
    metric.update(0.02)
    assert metric.compute().item() == pytest.approx(0.04 / 0.04)


def test_overlap_of_the_unknown_is_not_a_number():
    for times in ((math.nan, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1.0, math.nan), (0.0, 0.0, 0.0)):
        assert math.isnan(npu.metrics.overlap_efficiency(*times))
    metric = npu.metrics.OverlapEfficiency()
    metric.update(0.05, train_s=0.05)
    assert metric.compute().isnan(), "without the NPU's time there is no limit"


def test_overlap_refuses_what_is_no_duration():
    metric = npu.metrics.OverlapEfficiency()
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="'train_s' is no duration"):
            metric.update(1.0, train_s=bad)
    with pytest.raises(InputError, match="steps of 1 or more"):
        metric.update(1.0, steps=0)
    with pytest.raises(InputError, match="'npu_s'"):
        npu.metrics.overlap_efficiency(1.0, 1.0, -0.1)


# --- fidelity

SHAPES = [((), None), ((5,), 0), ((3, 4), None), ((6, 2, 3), 0), ((2, 6, 3), 1), ((2, 1, 4, 5), -1), ((4, 0, 2), 0)]


@given(st.integers(0, 2**31), st.sampled_from(SHAPES[:-1]), st.floats(-10, 150), st.sampled_from(["", "zero", "mask"]))
@settings(deadline=None, max_examples=80)
def test_fidelity_agrees_with_that_of_the_compiler(seed, shape_axis, level_db, special):
    (shape, axis), generator = shape_axis, torch.Generator().manual_seed(seed)
    reference, noise = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    candidate = reference + noise * 10 ** (-level_db / 20)
    if special == "zero":
        reference = torch.zeros_like(reference)
    if special == "mask" and shape:
        reference.flatten()[0] = candidate.flatten()[0] = -math.inf
    expected = compare(reference, candidate, batch_axis=axis)
    figures = npu.metrics.feature_fidelity(candidate, reference, batch_axis=axis)
    for name in ("cosine", "sqnr_db", "max_abs_error"):
        assert figures[name] == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-9), name
    samples = 1 if axis is None or not shape else shape[axis]
    rows = [
        (reference, candidate) if samples == 1 else (reference.select(axis, n), candidate.select(axis, n))
        for n in range(samples)
    ]
    worst = [compare(*row, batch_axis=None) for row in rows]
    assert figures["worst_cosine"] == pytest.approx(min(row.cosine for row in worst), abs=1e-9)
    assert figures["worst_sqnr_db"] == pytest.approx(min(row.sqnr_db for row in worst), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_fidelity_takes_any_real_dtype(dtype):
    reference = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    candidate = torch.roll(reference, 1, dims=1)
    expected = compare(reference, candidate)
    figures = npu.metrics.feature_fidelity(candidate, reference)
    assert figures["sqnr_db"] == pytest.approx(expected.sqnr_db)
    assert figures["cosine"] == pytest.approx(expected.cosine)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_only_one_side_lacks_makes_the_output_worthless(bad):
    reference = torch.ones(3, 4)
    candidate = reference.clone()
    candidate[1, 2] = bad
    for pair in ((candidate, reference), (reference, candidate)):
        figures = npu.metrics.feature_fidelity(*pair)
        assert figures == dict(zip(fidelity.FIGURES, (0.0, -LIMIT_DB, math.inf, 0.0, -LIMIT_DB), strict=True))
    assert compare(reference, candidate).sqnr_db == -LIMIT_DB
    metric = npu.metrics.FeatureFidelity()
    metric.update(candidate, reference)
    metric.update(reference, reference)
    assert metric.compute()["sqnr_db"] == -LIMIT_DB


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_fidelity_over_batches_is_that_of_all_samples():
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(50, 3, 4, generator=generator) * torch.logspace(-3, 3, 50)[:, None, None]
    candidate = reference + torch.randn(50, 3, 4, generator=generator) * 0.01
    metric = npu.metrics.FeatureFidelity()
    for part in range(0, 50, 7):
        metric.update(candidate[part : part + 7], reference[part : part + 7])
    expected = compare(reference, candidate)
    figures = metric.compute()
    assert set(figures) == set(fidelity.FIGURES)
    for name in ("cosine", "sqnr_db", "max_abs_error"):
        assert figures[name].item() == pytest.approx(getattr(expected, name), rel=1e-12)
    assert metric(reference, reference)["sqnr_db"] == LIMIT_DB
    assert metric.compute()["sqnr_db"] == pytest.approx(figures["sqnr_db"].item() + 10 * math.log10(2))
    metric.reset()
    assert all(value.isnan() for value in metric.compute().values())


def test_fidelity_of_several_outputs():
    metric = npu.metrics.FeatureFidelity(["tokens", "summary"], batch_axis={"tokens": 1})
    tokens, summary = torch.randn(5, 2, 3), torch.randn(2, 3)
    metric.update({"summary": summary, "tokens": tokens * 1.1, "unused": summary}, (tokens, summary))
    figures = metric.compute()
    assert figures["tokens/sqnr_db"].item() == pytest.approx(20, abs=1e-4)
    assert figures["summary/sqnr_db"] == LIMIT_DB
    assert metric.samples.tolist() == [2, 2]
    assert len(figures) == 2 * len(fidelity.FIGURES)
    worst = npu.metrics.FeatureFidelity(["tokens", "summary"], figure="max_abs_error")
    worst.update([tokens, summary], [tokens, summary + 2])
    assert worst.compute().item() == pytest.approx(2, abs=1e-6)


def test_fidelity_without_samples_is_not_a_number():
    assert all(map(math.isnan, npu.metrics.feature_fidelity(torch.ones(4, 0, 2), torch.ones(4, 0, 2)).values()))
    metric = npu.metrics.FeatureFidelity(["a", "b"], figure="cosine")
    metric.update([torch.ones(2, 2), torch.ones(0, 2)], [torch.ones(2, 2), torch.ones(0, 2)])
    assert metric.compute().isnan()


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_fidelity_survives_casts_copies_and_checkpoints():
    reference = torch.randn(4, 3)
    metric = npu.metrics.FeatureFidelity()
    metric.persistent(True)
    metric.update(reference * (1 + 1e-6), reference)
    expected = {name: value.item() for name, value in metric.compute().items()}
    metric.to(torch.bfloat16)
    restored = npu.metrics.FeatureFidelity()
    restored.load_state_dict(metric.state_dict())
    for other in (metric, restored, pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)):
        assert {name: value.item() for name, value in other.compute().items()} == expected


def test_messages_of_refused_features():
    metric = npu.metrics.FeatureFidelity(["a", "b"])
    with pytest.raises(InputError, match=r"2: \['a', 'b'\]"):
        metric.update(torch.ones(2), torch.ones(2))
    with pytest.raises(InputError, match=r"real values of shape \[3\]"):
        metric.update([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(3)])
    with pytest.raises(InputError, match="complex64"):
        npu.metrics.feature_fidelity(torch.ones(2, dtype=torch.complex64), torch.ones(2))
    assert metric.samples.tolist() == [0, 0]
    with pytest.raises(InputError, match="one of cosine, sqnr_db"):
        npu.metrics.FeatureFidelity(figure="psnr")
    for names in ("ab", [], ["a", "a"]):
        with pytest.raises(InputError, match="different names"):
            npu.metrics.FeatureFidelity(names)


# --- two processes

WITHOUT = "no update at all"
RANKS: dict[str, tuple[list[Any], float]] = {
    "a shared board counts once": ([({GPU: (100.0, 10.0)}, 30), ({GPU: (79.0, 8.0)}, 20)], 2.0),
    "the same, the other rank longer": ([({GPU: (79.0, 8.0)}, 30), ({GPU: (100.0, 10.0)}, 20)], 2.0),
    "two boards add up": ([({GPU: (100.0, 10.0)}, 30), ({NPU: (50.0, 10.0)}, 20)], 3.0),
    "a shared NPU beside a GPU each": (
        [({"a/GPU-0": (100.0, 9.0), NPU: (20.0, 9.0)}, 30), ({"a/GPU-1": (80.0, 9.5), NPU: (21.0, 9.5)}, 37)],
        3.0,
    ),
    "one node's name does not hide the other's": ([({"a/GPU-0": (1.0, 1.0)}, 1), ({"b/GPU-0": (2.0, 1.0)}, 2)], 1.0),
    "a rank without a board": ([({GPU: (100.0, 10.0)}, 30), ({}, 20)], 2.0),
    "a rank that cannot know": ([(None, 30), ({GPU: (100.0, 10.0)}, 20)], 2.0),
    "a rank without samples": ([({GPU: (100.0, 10.0)}, 50), ({NPU: (50.0, 10.0)}, 0)], 3.0),
    "a rank without an update": ([({GPU: (100.0, 10.0)}, 50), WITHOUT], 2.0),
    "the first rank without an update": ([WITHOUT, ({GPU: (100.0, 10.0)}, 50)], 2.0),
    "no board anywhere": ([({}, 50), (None, 50)], math.nan),
    "no update anywhere": ([WITHOUT, WITHOUT], math.nan),
    "a lost board": ([({GPU: (100.0, 10.0)}, 50), ({NPU: None}, 5)], math.nan),
}


def _rank(rank: int, folder: str, prefilled: npu.metrics.EnergyPerSample) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name, (ranks, _) in RANKS.items():
        metric = npu.metrics.EnergyPerSample()
        metric._update_count = 1
        updates = [] if ranks[rank] == WITHOUT else [ranks[rank]] * 2
        for boards, samples in updates:  # twice the same ratio
            known = None if boards is None else {k: v and board_energy(*v) for k, v in boards.items()}
            metric.update(known, samples)
        results[name] = metric.compute().item()
        metric._computed = None
        assert metric.compute().item() == pytest.approx(results[name], nan_ok=True), "a second gather gives the same"
    own = npu.metrics.EnergyPerSample(dist_sync_on_step=True)
    results["on step"] = own({GPU: board_energy(10.0 + rank, 1.0 + rank)}, 1 + rank).item()
    results["filled before the ranks were spawned"] = prefilled.compute().item()
    resumed = npu.metrics.EnergyPerSample()
    resumed.persistent(True)
    resumed.load_state_dict(torch.load(f"{folder}/state.pt", weights_only=True))
    resumed.update({GPU: board_energy(20.0, 2.0)}, 5)
    results["resumed"] = resumed.compute().item()

    reference, candidate = torch.load(f"{folder}/features.pt", weights_only=True)
    features = npu.metrics.FeatureFidelity()
    part = slice(0, 3) if rank == 0 else slice(3, 17)
    features.update(candidate[part], reference[part])
    results["fidelity"] = {figure: value.item() for figure, value in features.compute().items()}
    lone = npu.metrics.FeatureFidelity(figure="cosine")
    lone._update_count = 1
    if rank == 1:
        lone.update(candidate, reference)
    results["fidelity of one rank"] = lone.compute().item()

    steps = npu.metrics.OverlapEfficiency()
    steps.update(0.10, train_s=0.05, npu_s=0.02 if rank == 0 else 0.09)
    steps.update(0.08)
    results["overlap"] = steps.compute().item()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    generator = torch.Generator().manual_seed(5)
    reference = torch.randn(17, 4, generator=generator)
    features = [reference, reference + 0.03 * torch.randn(17, 4, generator=generator)]
    torch.save(features, folder / "features.pt")
    earlier = npu.metrics.EnergyPerSample()
    earlier.persistent(True)
    earlier.update({GPU: board_energy(100.0, 10.0)}, 30)
    torch.save(earlier.state_dict(), folder / "state.pt")
    torch.multiprocessing.spawn(_rank, (str(folder), earlier), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], features


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name, two_ranks):
    for results in two_ranks[0]:
        assert results[name] == pytest.approx(RANKS[name][1], nan_ok=True)


def test_two_ranks_agree_with_one_process(two_ranks):
    results, (reference, candidate) = two_ranks
    expected = compare(reference, candidate)
    for result in results:
        assert result["on step"] == pytest.approx(11 / 3)
        assert result["resumed"] == pytest.approx(120 / 40)
        assert result["fidelity"]["sqnr_db"] == pytest.approx(expected.sqnr_db)
        assert result["fidelity"]["max_abs_error"] == pytest.approx(expected.max_abs_error)
        assert result["fidelity"]["cosine"] == pytest.approx(expected.cosine)
        worst = npu.metrics.feature_fidelity(candidate, reference)
        assert result["fidelity"]["worst_sqnr_db"] == pytest.approx(worst["worst_sqnr_db"])
        assert result["fidelity of one rank"] == pytest.approx(expected.cosine)
        assert result["overlap"] == pytest.approx(0.09 / 0.09), "the slowest rank sets the pace"


def test_copies_of_a_metric_that_was_filled_before_spawning_count_once(two_ranks):
    for results in two_ranks[0]:
        assert results["filled before the ranks were spawned"] == pytest.approx(100 / 30)
