"""Against the real wandb, offline: what a run file holds afterwards."""

from __future__ import annotations

import csv
import doctest
import itertools
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, WandbLogger

import lightning_npu as npu
from lightning_npu import keys
from lightning_npu.power.base import Board
from lightning_npu.report import workspace_json
from lightning_npu.wandb_logging import (
    decimate,
    define_metrics,
    log_power_trace,
    trace_csv,
    wandb_loggers,
    write_summary,
)

pytest.importorskip("wandb", reason="pip install 'lightning-npu[wandb]'")
import wandb_file

TRACE = {"gpu0": [(0.05 * n, 100.0 + n % 7) for n in range(1000)], "npu0": [(0.1 * n, 8.0) for n in range(300)]}


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    yield
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()  # or the environment of the first run would hold for all of the process


class Meter(pl.Callback):
    """Logs as the energy meter does, with known joules."""

    def on_fit_start(self, trainer, pl_module):
        self.done = [
            define_metrics(logger, metrics=["val/loss", "train/*"]) for logger in wandb_loggers(trainer.loggers)
        ]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        row = {
            keys.ELAPSED_S: 0.5 * step,
            keys.TOTAL_J: 12.5 * step,
            keys.PER_SAMPLE_J: 12.5,
            keys.board_power_w("gpu0"): 25.0,
            keys.misses("learning"): 1,
        }
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)

    def on_fit_end(self, trainer, pl_module):
        for logger in wandb_loggers(trainer.loggers):
            self.done.append(log_power_trace(logger, TRACE, limit=200, step=trainer.global_step, csv_artifact=True))
            numbers = {keys.TOTAL_J: torch.tensor(99.5), keys.NET_PER_SAMPLE_J: None, keys.COVERAGE: float("nan")}
            self.done.append(write_summary(logger, {**numbers, keys.phase_j("train"): 7, "energy/state": "ok"}))


class Model(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch).sum())


def fit(tmp_path: Path, *loggers) -> Meter:
    meter = Meter()
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=list(loggers),
        callbacks=[meter],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    return meter


def test_a_run_read_back(tmp_path):
    logger, csv_logger = WandbLogger(project="p", save_dir=tmp_path), CSVLogger(tmp_path / "csv")
    meter = fit(tmp_path, logger, csv_logger)
    assert meter.done == [True, True, True]
    logger.experiment.finish()
    found = wandb_file.finished_run(tmp_path)

    axes = wandb_file.metrics(found)
    assert axes["*"] == "trainer/global_step", "Lightning's own"
    assert axes["energy/*"] == axes["npu/*"] == axes[keys.TOTAL_J] == keys.ELAPSED_S
    assert axes[keys.ELAPSED_S] == ""
    assert axes["val/loss"] == axes["train/*"] == keys.TOTAL_J

    rows = wandb_file.history(found)
    metered = [row for row in rows if keys.PER_SAMPLE_J in row]
    assert [row[keys.TOTAL_J] for row in metered] == [12.5 * step for step in range(1, 7)]
    assert [row["trainer/global_step"] for row in metered] == list(range(1, 7))
    assert {row[keys.board_power_w("gpu0")] for row in metered} == {25.0}
    validation = [row for row in rows if "val/loss" in row]
    assert [row[keys.TOTAL_J] for row in validation] == [37.5, 75.0], "W&B adds the joules to the metric's row"

    total = wandb_file.summary(found)
    assert total[keys.TOTAL_J] == 99.5
    assert total[keys.phase_j("train")] == 7
    assert total["energy/state"] == "ok"
    assert keys.NET_PER_SAMPLE_J not in total
    assert keys.COVERAGE not in total

    [file] = tmp_path.glob("wandb/**/media/table/energy/*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["time_s", "board", "power_w"]
    assert 150 <= len(table["data"]) <= 200
    assert {row[1] for row in table["data"]} == {"gpu0", "npu0"}
    assert any(f"{keys.POWER_TRACE}.nrows" in row or keys.POWER_TRACE in row for row in rows)
    artifact = wandb_file.artifacts(found)["power_trace"]
    assert [entry.path for entry in artifact.manifest.contents] == ["power_trace.csv"]
    assert artifact.manifest.contents[0].size == len(trace_csv(TRACE).encode())

    with next((tmp_path / "csv").glob("**/metrics.csv")).open() as lines:
        assert set(next(csv.reader(lines))) >= {keys.TOTAL_J, keys.PER_SAMPLE_J, keys.board_power_w("gpu0")}


def test_the_loggers_prefix_and_a_changed_one(tmp_path):
    logger = WandbLogger(project="p", save_dir=tmp_path, prefix="arm")
    assert define_metrics(logger, prefix="e/", metrics=["val/loss"])
    assert write_summary(logger, {"e/total_j": 3.0})
    logger.log_metrics({"e/elapsed_s": 4.0, "e/total_j": 1.0}, step=1)
    assert log_power_trace(logger, TRACE, prefix="e/")
    assert log_power_trace(logger, {}, prefix="e/"), "no trace, no table"
    logger.experiment.finish()
    found = wandb_file.finished_run(tmp_path)
    axes = wandb_file.metrics(found)
    assert axes["arm-e/*"] == axes["arm-npu/*"] == "arm-e/elapsed_s"
    assert axes["arm-val/loss"] == "arm-e/total_j"
    assert wandb_file.history(found)[0]["arm-e/elapsed_s"] == 4.0
    assert wandb_file.summary(found)["arm-e/total_j"] == 1.0, "the later row wins"
    tables = list(tmp_path.glob("wandb/**/media/table/arm-e/power_trace*.json"))
    assert len(tables) == 1
    assert "power_trace" not in wandb_file.artifacts(found), "no CSV unless asked for"


def test_a_plain_run_without_lightning(tmp_path):
    import wandb

    run = wandb.init(project="p", dir=tmp_path)
    assert define_metrics(run, prefix="")
    run.log({"total_j": 1.0, "elapsed_s": 2.0})
    assert log_power_trace(run, {"gpu0": [(0.0, 1.0)]}, prefix="")
    run.finish()
    found = wandb_file.finished_run(tmp_path)
    assert wandb_file.metrics(found) == {"elapsed_s": "", "total_j": "elapsed_s", "npu/*": "elapsed_s"}
    assert list(tmp_path.glob("wandb/**/media/table/power_trace*.json"))


def test_disabled_other_ranks_and_other_loggers_are_left_alone(tmp_path, monkeypatch):
    from lightning.fabric.loggers.logger import _DummyExperiment
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = WandbLogger(project="p", save_dir=tmp_path)
    assert isinstance(logger.experiment, _DummyExperiment)
    targets = [logger, _DummyExperiment(), CSVLogger(tmp_path), None]
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    targets.append(WandbLogger(project="p", save_dir=tmp_path))
    for rank, target in [(1, targets[0]), *((0, target) for target in targets[1:])]:
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        assert not define_metrics(target, metrics=["val/loss"])
        assert not write_summary(target, {keys.TOTAL_J: 1.0})
        assert not log_power_trace(target, TRACE, csv_artifact=True)
    assert not list(tmp_path.glob("**/*.wandb"))


def test_a_failing_run_is_logged_and_does_not_raise(tmp_path, caplog):
    import wandb

    run = wandb.init(project="p", dir=tmp_path)
    with caplog.at_level(logging.WARNING, logger="lightning_npu"):
        assert not define_metrics(run, metrics=[""])
        assert not log_power_trace(run, {"gpu0": [("late", "hot"), (1,)]})
        run.finish()
        assert not write_summary(run, {keys.TOTAL_J: [object()]})
    messages = [record.message for record in caplog.records if record.name == "lightning_npu.wandb_logging"]
    named = [re.search(r"W&B: (\w+) failed \((\w+)", message).groups() for message in messages]
    assert [function for function, _ in named] == ["define_metrics", "log_power_trace", "write_summary"]
    assert all("the run goes on" in message for message in messages)


def test_wandb_is_not_imported_for_other_loggers():
    code = (
        "import sys; from lightning.pytorch.loggers import CSVLogger; import lightning_npu.wandb_logging as w\n"
        "logger = CSVLogger('unused'); assert w.wandb_loggers([logger, None]) == []\n"
        "assert not w.define_metrics(logger) and not w.write_summary(logger, {'a': 1}), 'no run'\n"
        "assert not w.log_power_trace(logger, {'gpu0': [(0, 1)]})\n"
        "import lightning_npu; lightning_npu.wandb_workspace\n"
        "print('wandb' in sys.modules, 'wandb_workspaces' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_other_lightning_package_is_known():
    other = pytest.importorskip("pytorch_lightning")
    logger = other.loggers.WandbLogger(project="p", offline=True)
    assert wandb_loggers([logger, CSVLogger("unused")]) == [logger]


def _points(draw):
    times = sorted(draw(st.lists(st.floats(0, 1e4), min_size=2, max_size=80, unique=True)))
    return [(time_s, draw(st.floats(0, 1e3))) for time_s in times]


@given(st.composite(_points)(), st.integers(1, 100))
def test_decimation_keeps_energy_and_order(points, limit):
    bins = decimate(points, limit)
    assert len(bins) <= limit
    assert [time_s for time_s, _ in bins] == sorted(time_s for time_s, _ in bins)
    low, high = min(w for _, w in points), max(w for _, w in points)
    assert all(low - 1e-6 <= power_w <= high + 1e-6 for _, power_w in bins)
    if limit == 1:
        energy_j = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
        assert bins[0][1] * (points[-1][0] - points[0][0]) == pytest.approx(energy_j, rel=1e-6, abs=1e-6)


def test_decimation_of_points_at_one_moment():
    assert decimate([(1.0, 2.0), (1.0, 4.0)], 1) == [(1.0, 3.0)]
    assert decimate([], 3) == []


# --- keys


def test_examples_in_the_docs_are_true():
    failed, attempted = doctest.testmod(keys)
    assert attempted
    assert not failed


def test_every_key_of_the_module_is_logged_under_any_prefix():
    assert {keys.TOTAL_J, keys.BOARD_POWER_W, keys.WAIT_S, keys.POWER_TRACE} <= keys.FIXED
    families = [keys.phase_j("data_wait"), keys.board_power_w("node7-gpu0"), keys.board_counter_ratio("npu0")]
    for key in [*keys.FIXED, *families, keys.misses("edited"), keys.kind_j("npu"), keys.kind_power_w("cpu")]:
        assert keys.is_logged(key), key
        assert keys.is_logged(keys.with_prefix(key, "robot/e/"), "robot/e/")
    for key in ("energy/total", "energy/phase/nap_j", "energy/board/a/b/power_w", "total_j", "npu/misses"):
        assert not keys.is_logged(key)
    assert not keys.is_logged("energy/total_j", "robot/e/")


def test_short_names_of_boards_are_unique_and_stable():
    def board(key, kind, index=None, simulated=False):
        return Board(key, kind, "any", index=index, simulated=simulated)

    one_host = [board("a/GPU-1", "gpu", 0), board("a/GPU-0", "gpu", 1), board("a/aries", "npu", 0)]
    assert keys.board_names(one_host) == {"a/GPU-1": "gpu0", "a/GPU-0": "gpu1", "a/aries": "npu0"}
    many = [*one_host, board("b/GPU-9", "gpu", 0), board("b/x", "npu", 0, simulated=True), board("a/other", "npu", 0)]
    names = keys.board_names(many)
    assert names == keys.board_names([*reversed(many), many[0]])
    assert len(set(names.values())) == len(many)
    assert names["b/GPU-9"] == "b-gpu0"
    assert names["b/x"] == "simulated-b-npu0"
    assert {names["a/aries"], names["a/other"]} == {"a-npu0-1", "a-npu0-2"}
    assert all(keys.is_logged(keys.board_power_w(name)) for name in names.values())


# --- the dashboard


def plotted(workspace) -> list[dict]:
    sections = json.loads(workspace_json(workspace))["section"]["panelBankConfig"]["sections"]
    return [panel["config"] | {"section": section["name"]} for section in sections for panel in section["panels"]]


@pytest.fixture
def no_network(monkeypatch):
    import socket

    def refuse(*args):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    pytest.importorskip("wandb_workspaces")


@pytest.mark.parametrize("prefix", [keys.PREFIX, "robot/e-1/"])
def test_the_dashboard_plots_only_what_is_logged(no_network, prefix):
    panels = plotted(npu.wandb_workspace("team", "robot", prefix=prefix, metric=["val/success", "val/loss"]))
    families = [keys.board_power_w("npu0"), keys.board_counter_ratio("b-gpu12"), keys.misses("edited")]
    matched = set()
    for panel in panels:
        axes = [panel[axis].removeprefix("summary:") for axis in ("xAxis", "yAxis") if axis in panel]
        for key in [*panel.get("metrics", []), *axes]:
            assert keys.is_logged(key, prefix) or key in ("val/success", "val/loss"), panel
        if panel.get("useMetricRegex"):
            hits = [key for key in families if re.search(panel["metricRegex"], keys.with_prefix(key, prefix))]
            assert len(hits) == 1, panel
            matched.update(hits)
        else:
            assert panel.get("metrics") or panel.get("yAxis"), "an empty panel"
    assert matched == set(families)


def test_the_dashboard_shows_what_it_promises(no_network):
    panels = plotted(npu.wandb_workspace("team", "robot", name="Joules"))
    stacked = next(panel for panel in panels if "board" in panel.get("metricRegex", ""))
    assert stacked["plotType"] == "stacked-area"
    assert stacked["xAxis"] == keys.ELAPSED_S
    assert any(panel.get("metrics") == ["val/loss"] and panel["xAxis"] == keys.TOTAL_J for panel in panels)
    shown = {key for panel in panels for key in panel.get("metrics", [])}
    assert shown >= keys.FIXED - {keys.ELAPSED_S, keys.POWER_TRACE}, "all that the meter logs is on it"
    assert {keys.phase_j(phase) for phase in keys.PHASES} <= shown
    named = plotted(npu.wandb_workspace("team", "robot", boards=["gpu0", "npu0"]))
    assert any(panel.get("metrics") == ["energy/board/gpu0/power_w", "energy/board/npu0/power_w"] for panel in named)


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.delitem(sys.modules, "wandb_workspaces.workspaces", raising=False)
    with pytest.raises(npu.NPUError, match=r"pip install 'lightning-npu\[wandb\]'"):
        npu.wandb_workspace("team", "robot")
