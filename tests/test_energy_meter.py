"""EnergyMeter against boards whose power is known exactly, in real trainers."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import make_encoder, make_images
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from meter_parts import (
    GPU,
    NPU,
    SIZE,
    Model,
    Rows,
    Stream,
    Truth,
    boards,
    left_behind,
    loader,
    make_trainer,
    meter,
    read_report,
    rows_of,
    total_j,
)
from torch.utils.data import DataLoader, TensorDataset

import lightning_npu as npu
from lightning_npu import keys
from lightning_npu.metering.arguments import whole
from lightning_npu.power.base import Reading
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource
from lightning_npu.runtimes import SimulatedRuntime

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def truth(monkeypatch) -> Truth:
    return Truth(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    assert not left_behind()


def check(report: dict[str, Any], truth: Truth, *, samples: int | None = None, steps: int | None = None) -> None:
    """Energy in all and by phase against the exact integral; parts make up the whole."""
    total = report["total"]
    assert abs(total["energy_j"] - truth.energy_j()) <= total["uncertainty_j"]
    phases = report["phases"]
    assert sum(phase["energy_j"] for phase in phases.values()) == pytest.approx(total["energy_j"], rel=1e-6)
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(report["elapsed_s"], rel=1e-6)
    for name, phase in phases.items():
        assert abs(phase["energy_j"] - truth.phase_j(name)) <= phase["uncertainty_j"] + 1e-9, name
    assert sum(kind["energy_j"] for kind in report["by_kind"].values()) == pytest.approx(total["energy_j"])
    if samples is not None:
        assert report["samples"] == samples
        trained = phases["train"]["energy_j"] + phases["data_wait"]["energy_j"]
        assert report["per_sample_j"] == pytest.approx(trained / samples)
    if steps is not None:
        assert report["optimizer_steps"] == steps


# --- truth


def test_a_run_with_validation_and_checkpoints(tmp_path, truth):
    energy = meter()
    trainer = make_trainer(
        tmp_path, energy, enable_checkpointing=True, num_sanity_val_steps=2, val_check_interval=0.5, max_epochs=3
    )
    trainer.fit(Model(step_s=0.01, validation_s=0.01), loader(), loader(16))
    report = read_report(energy.path)
    assert report == energy.report
    check(report, truth, samples=120, steps=30)
    assert {"train", "data_wait", "validation", "checkpoint", "other"} == set(report["phases"])
    assert report["ended"] == "finished"
    assert [epoch["epoch"] for epoch in report["epochs"]] == [0, 1, 2]
    assert [epoch["samples"] for epoch in report["epochs"]] == [40, 40, 40]
    inner_j = sum(epoch["energy_j"] for epoch in report["epochs"])
    assert 0.5 * total_j(report) < inner_j < total_j(report)


BATCHES = {
    "pairs": lambda rows: tuple(map(torch.stack, zip(*rows, strict=True))),
    "dicts": lambda rows: dict(zip("xy", map(torch.stack, zip(*rows, strict=True)), strict=True)),
    "scalar first": lambda rows: {"weight": torch.tensor(1.0), **BATCHES["dicts"](rows)},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_shape_are_counted(tmp_path, kind, truth):
    energy = meter()
    make_trainer(tmp_path, energy, max_epochs=1).fit(Model(), loader(38, collate_fn=BATCHES[kind]))
    check(energy.report, truth, samples=38, steps=10)


def test_a_batch_that_is_none_has_no_samples(tmp_path, truth):
    class Gaps(Stream):
        def __iter__(self):
            for number in range(12):
                yield None if number % 3 == 1 else (self.rows.x[:5], self.rows.y[:5])

    energy = meter()
    make_trainer(tmp_path, energy, max_epochs=1).fit(Model(), DataLoader(Gaps(12), batch_size=None))
    check(energy.report, truth, samples=40)


OPTIONS: dict[str, tuple[dict[str, Any], int, int]] = {  # trainer's options, samples, optimizer steps
    "limit": ({"limit_train_batches": 3}, 24, 6),
    "share": ({"limit_train_batches": 0.5}, 40, 10),
    "max_steps": ({"max_steps": 7, "max_epochs": -1}, 28, 7),
    "overfit": ({"overfit_batches": 2}, 16, 4),
    "accumulate": ({"accumulate_grad_batches": 4}, 80, 6),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, 80, 20),
    "no epochs": ({"max_epochs": 0}, 0, 0),
    "nothing": ({"limit_train_batches": 0}, 0, 0),
    "max_time": ({"max_time": {"seconds": 30}}, 80, 20),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_trainer(tmp_path, name, truth):
    options, samples, steps = OPTIONS[name]
    energy = meter()
    make_trainer(tmp_path, energy, **options).fit(Model(), loader())
    report = read_report(energy.path)
    if samples:
        check(report, truth, samples=samples, steps=steps)
    else:
        assert (report["samples"], report["optimizer_steps"], report["per_sample_j"]) == (0, 0, None)
        assert report["total"]["energy_j"] > 0


def test_a_stream_without_a_length(tmp_path, truth):
    energy = meter()
    make_trainer(tmp_path, energy).fit(Model(), DataLoader(Stream(22), batch_size=4))
    check(energy.report, truth, samples=44, steps=12)


def test_manual_optimisation_with_two_optimizers(tmp_path, truth):
    class Manual(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.layer.parameters(), lr=0.01) for _ in range(2)]

        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    energy, logger = meter(rolling_s=0.01), CSVLogger(tmp_path)
    make_trainer(tmp_path, energy, max_epochs=1, logger=logger, log_every_n_steps=1).fit(Manual(), loader())
    check(energy.report, truth, samples=40, steps=20)
    logged = [row for row in rows_of(logger) if keys.TOTAL_J in row]
    assert [row["step"] for row in logged][:10] == list(range(10))


def test_rolling_windows_leave_validation_out(tmp_path):
    """Validation draws 100 times as much here: what leaks into a training window shows."""
    drawing = {"watts": 10.0}

    class Device:
        def __init__(self):
            self.total_j, self.since_s = 0.0, time.monotonic()

        def power_w(self):
            return drawing["watts"]

        def energy_j(self):
            now_s = time.monotonic()
            self.total_j += drawing["watts"] * (now_s - self.since_s)
            self.since_s = now_s
            return self.total_j

    device = Device()

    class Switch(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            device.energy_j()
            drawing["watts"] = 1000.0

        def on_validation_end(self, trainer, pl_module):
            device.energy_j()
            drawing["watts"] = 10.0

    source = SimulatedSource([SimulatedBoard(device, counter=True)])
    energy, logger = meter(source, rolling_s=0.2, interval_s=0.005), CSVLogger(tmp_path)
    trainer = make_trainer(
        tmp_path, energy, Switch(), logger=logger, log_every_n_steps=1, val_check_interval=5, max_epochs=1
    )
    trainer.fit(Model(step_s=0.02, validation_s=0.02), loader(160), loader(16))
    rows = [row for row in rows_of(logger) if keys.STEP_J in row]
    assert len(rows) > 10
    step_j = [row[keys.STEP_J] for row in rows]
    assert max(step_j) < 3 * 10.0 * 0.03, "the power of a validation has leaked into the steps around it"
    report = energy.report
    assert report["per_sample_j"] < 3 * 10.0 * 0.03 / 4
    assert report["phases"]["validation"]["mean_power_w"] == pytest.approx(1000.0, rel=0.1)
    assert all(epoch["per_sample_j"] < 3 * 10.0 * 0.03 / 4 for epoch in report["epochs"])


def test_slow_sensors_lengthen_the_window(tmp_path):
    energy, logger = meter(boards(update_s=0.1), rolling_s=0.1), CSVLogger(tmp_path)
    make_trainer(tmp_path, energy, logger=logger, log_every_n_steps=1, max_epochs=1).fit(
        Model(step_s=0.02), loader(200)
    )
    assert any(keys.TOTAL_J in row for row in rows_of(logger))
    known = [row for row in rows_of(logger) if 0.8 < row.get(keys.ELAPSED_S, 0.0) < 0.95]  # by then its period is
    assert not any(keys.STEP_J in row for row in known)


def test_fit_twice_and_validate_in_between(tmp_path, truth):
    energy = meter()
    trainer, model = make_trainer(tmp_path, energy, max_epochs=1), Model(step_s=0.005)
    trainer.validate(model, loader(8), verbose=False)
    assert energy.path == tmp_path / "energy-validation.json"
    validated = read_report(energy.path)
    assert validated["samples"] == 8
    assert validated["per_sample_j"] == pytest.approx(validated["phases"]["validation"]["energy_j"] / 8)
    trainer.fit(model, loader())
    first = read_report(tmp_path / "energy.json")
    assert first["samples"] == 40
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert energy.path == tmp_path / "energy-2.json"
    second = read_report(energy.path)
    assert (second["samples"], second["optimizer_steps"]) == (80, 20)
    assert total_j(second) > total_j(first)
    assert abs(total_j(validated) + total_j(second) - truth.energy_j()) < second["total"]["uncertainty_j"]
    assert read_report(tmp_path / "energy.json") == first
    other = make_trainer(tmp_path, energy, max_epochs=1)
    other.fit(Model(), loader())
    assert energy.report["samples"] == 40, "another trainer begins anew"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluations_alone(tmp_path, stage, truth):
    energy, logger = meter(), CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, energy, logger=logger)
    getattr(trainer, stage)(Model(), loader(12))
    name = {"validate": "validation"}.get(stage, stage)
    assert energy.path == Path(trainer.log_dir) / f"energy-{name}.json"
    report = read_report(energy.path)
    assert abs(total_j(report) - truth.energy_j()) <= report["total"]["uncertainty_j"]
    assert report["samples"] == 12
    logged = {key for row in rows_of(logger) for key in row if key.startswith("energy/")}
    assert logged <= {keys.phase_j(name)}


def test_a_test_after_a_training_leaves_its_figures(tmp_path):
    energy, logger = meter(), CSVLogger(tmp_path)
    trainer, model = make_trainer(tmp_path, energy, logger=logger, max_epochs=1), Model(step_s=0.01)
    trainer.fit(model, loader())
    fitted = total_j(energy.report)
    trainer.test(model, loader(4), verbose=False)
    shown = [row[keys.TOTAL_J] for row in rows_of(logger) if keys.TOTAL_J in row]
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(fitted, rel=0.05)


@pytest.mark.parametrize("options", [{"fast_dev_run": 2}, {"barebones": True}, {"log_every_n_steps": 0}])
def test_trainers_that_log_nothing(tmp_path, options, truth, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    energy = meter()
    trainer = make_trainer(tmp_path, energy, **options)
    monkeypatch.setattr(Model, "log", lambda *args, **kwargs: None)
    trainer.fit(Model(), loader(8), loader(8))
    samples = 8 if "fast_dev_run" in options else 16
    check(energy.report, truth, samples=samples)
    assert not [warning for warning in recwarn if "barebones" in str(warning.message)]
    if "fast_dev_run" in options:
        assert energy.path is None
        assert not list(tmp_path.rglob("*"))


def test_tuners_find_the_same_and_count_their_energy(tmp_path, truth):
    class Tunable(Model):
        def __init__(self):
            super().__init__()
            self.lr, self.batch_size = 0.01, 2

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

        def train_dataloader(self):
            return loader(64, batch_size=self.batch_size)

        def val_dataloader(self):
            return loader(8)

    def tuned(*callbacks):
        pl.seed_everything(3)
        model = Tunable()
        tuner = Tuner(make_trainer(tmp_path, *callbacks, max_epochs=1))
        found = tuner.lr_find(model, num_training=12).suggestion()
        tuner.scale_batch_size(model, max_trials=2, steps_per_trial=1)
        return found, model.batch_size

    assert tuned(meter()) == tuned()
    energy = meter()
    inside = pl.callbacks.LearningRateFinder(num_training_steps=12)
    make_trainer(tmp_path, energy, inside, max_epochs=1).fit(Tunable())
    report = energy.report
    assert report["samples"] == 2 * report["optimizer_steps"] > 0, "what the finder tried is energy, but no training"
    assert abs(total_j(report) - truth.energy_j()) <= report["total"]["uncertainty_j"]
    assert sum(phase["energy_j"] for phase in report["phases"].values()) == pytest.approx(total_j(report), rel=1e-6)


# --- the training stays what it is


def test_training_is_bit_equal_to_training_without(tmp_path):
    def trained(*callbacks):
        pl.seed_everything(11)
        model = Model()
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=3, num_sanity_val_steps=2, log_every_n_steps=1)
        trainer.fit(model, loader(num_workers=0), loader(8))
        return model.seen, [parameter.detach().clone() for parameter in model.parameters()]

    seen, weights = trained()
    seen_metered, weights_metered = trained(meter(boards(counter=False)))
    assert seen == seen_metered
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_metered, strict=True))


def test_an_offloaded_encoder_trains_the_same_and_is_looked_ahead_for(tmp_path):
    images, targets = make_images(24, seed=2), torch.randn(24, 2, generator=torch.Generator().manual_seed(3))

    class Policy(pl.LightningModule):
        def __init__(self, runtime, late):
            super().__init__()
            self.encoder = make_encoder() if late else npu.NPUFrozenModule.from_runtime(runtime)
            self.runtime, self.late = runtime, late
            self.head = torch.nn.Linear(8, 2)

        def setup(self, stage):
            if self.late:
                self.encoder = npu.NPUFrozenModule.from_runtime(self.runtime)

        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.head(self.encoder(batch[0])[1]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.head.parameters(), lr=0.01)

    def trained(*callbacks, late=False):
        pl.seed_everything(11)
        runtime = SimulatedRuntime(make_encoder(), latency_s=0.003, active_w=20.0, idle_w=5.0)
        model = Policy(runtime, late)
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=8)
        trainer.fit(model, DataLoader(TensorDataset(images, targets), batch_size=2, shuffle=True))
        for method in ("process_dataloader", "batch_to_device", "setup"):
            assert method not in vars(trainer.strategy)
        assert "save_checkpoint" not in vars(trainer)
        runtime.close()
        return model.head.weight.detach().clone()

    alone = trained()
    for owner in (
        [npu.EnergyMeter()],
        [npu.EnergyMeter(prefetch=False)],
        [npu.Prefetch(), npu.EnergyMeter()],
        [npu.EnergyMeter(), npu.Prefetch()],
        [npu.EnergyMeter(prefetch=npu.Prefetch(depth=1))],
    ):
        assert torch.equal(alone, trained(*owner))
        energy = next(callback for callback in owner if isinstance(callback, npu.EnergyMeter))
        assert set(energy.report["modules"]) == {"encoder"}
        board = next(iter(energy.report["boards"].values()))
        assert (board["kind"], board["simulated"]) == ("npu", True)
        assert 5.0 <= energy.report["by_kind"]["npu"]["mean_power_w"] <= 20.0
        if energy.prefetch is None:
            assert energy.report["overlap"] is None
        else:
            assert 0.3 < energy.report["overlap"]["efficiency"] < 3.0
    energy = npu.EnergyMeter()
    assert torch.equal(alone, trained(energy, late=True))
    assert energy.prefetch.statistics.hits > 80


# --- what is logged


def test_keys_of_every_logger_are_the_documented_ones(tmp_path):
    csv, board = CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")
    energy = meter(rolling_s=0.05, idle_power_w={"gpu": 40.0, "npu": 5.0})
    trainer = make_trainer(tmp_path, energy, logger=[csv, board], log_every_n_steps=3, enable_checkpointing=True)
    trainer.fit(Model(step_s=0.01), loader(), loader(8))
    rows = rows_of(csv)
    logged = {key for row in rows for key in row if key.startswith(("energy/", "npu/"))}
    assert all(keys.is_logged(key) for key in logged)
    assert logged >= {
        *(keys.TOTAL_J, keys.GPU_J, keys.NPU_J, keys.PER_SAMPLE_J, keys.NET_PER_SAMPLE_J, keys.STEP_J, keys.EPOCH_J),
        *(keys.PER_OPTIMIZER_STEP_J, keys.UNCERTAINTY_J, keys.COVERAGE, keys.ELAPSED_S, keys.BOARD_POWER_W),
        *(keys.phase_j("train"), keys.phase_j("validation"), keys.phase_j("checkpoint"), keys.GPU_POWER_W),
        keys.board_power_w("simulated-gpu0"),
    }
    for key in (keys.TOTAL_J, keys.ELAPSED_S, keys.phase_j("train")):
        values = [row[key] for row in rows if key in row]
        assert values == sorted(values), key
    assert [row["step"] for row in rows if keys.BOARD_POWER_W in row] == [2, 5, 8, 11, 14, 17]
    board.experiment.flush()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(board.log_dir).Reload()
    assert {key for key in events.Tags()["scalars"] if key.startswith(("energy/", "npu/"))} == logged
    last, total = events.Scalars(keys.TOTAL_J)[-1].value, total_j(energy.report)
    assert total * (1 - 1e-6) <= last <= total * 1.1, "what was shown before does not go down, if it was too much"
    assert energy.path.parent == Path(csv.log_dir)


def test_every_key_is_in_the_documentation():
    text = Path(__file__).parents[1].joinpath("docs", "energy.md").read_text(encoding="utf-8")
    families = ("energy/phase/<phase>_j", keys.misses("<cause>"))
    families += (keys.board_power_w("<name>"), keys.board_counter_ratio("<name>"))
    assert [key for key in (*sorted(keys.FIXED), *families) if f"`{key}`" not in text] == []
    assert [phase for phase in keys.PHASES if f"`{phase}`" not in text] == []
    named = set(re.findall(r"`((?:energy|npu)/[^`*]+)`", text))
    assert named - {*keys.FIXED, *families} == set(), "what the documentation names is logged"


def test_energy_so_far_never_goes_down_in_the_logs(tmp_path):
    """A slow counter is extrapolated, and what comes may be less than what was expected."""
    source = SimulatedSource([SimulatedBoard(boards()._specs[0].power, kind="gpu", counter=True, update_s=0.2)])
    energy, logger = meter(source), CSVLogger(tmp_path)
    make_trainer(tmp_path, energy, logger=logger, log_every_n_steps=1, max_epochs=2).fit(
        Model(step_s=0.02), loader(160), loader(4)
    )
    for key in (keys.TOTAL_J, keys.GPU_J, keys.phase_j("train")):
        values = [row[key] for row in rows_of(logger) if key in row]
        assert len(values) > 5
        assert values == sorted(values), key


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("every", [1, 4])
def test_one_row_for_each_step_that_is_logged(tmp_path, every, accumulate):
    energy, logger = meter(), CSVLogger(tmp_path)
    trainer = make_trainer(
        tmp_path, energy, logger=logger, log_every_n_steps=every, accumulate_grad_batches=accumulate, max_epochs=1
    )
    trainer.fit(Model(), loader())
    steps = [row["step"] for row in rows_of(logger) if keys.BOARD_POWER_W in row]
    assert steps == [step for step in range(math.ceil(10 / accumulate)) if (step + 1) % every == 0]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("key", [keys.PER_SAMPLE_J, keys.TOTAL_J])
def test_early_stopping_and_checkpoints_can_monitor_energy(tmp_path, first, validated, key):
    """Epochs are shorter than log_every_n_steps, and the run than any window."""
    energy = meter()
    stop = EarlyStopping(key, mode="max", patience=2, check_finite=True, strict=True, min_delta=1e9)
    best = ModelCheckpoint(tmp_path / "best", monitor=key, mode="min", filename="{epoch}")
    callbacks = [energy, stop, best] if first else [stop, best, energy]
    trainer = make_trainer(tmp_path, *callbacks, enable_checkpointing=True, max_epochs=9, log_every_n_steps=50)
    trainer.fit(Model(), loader(8), *([loader(4)] if validated else []))
    assert trainer.current_epoch == 3, "the meter's figures have stopped it"
    assert best.best_model_score is not None
    assert float(best.best_model_score) > 0
    assert trainer.callback_metrics[key] > 0


def test_a_checkpoint_can_monitor_steps(tmp_path):
    energy, logger = meter(rolling_s=0.02), CSVLogger(tmp_path)
    best = ModelCheckpoint(tmp_path, monitor=keys.STEP_J, every_n_train_steps=10, save_top_k=1)
    trainer = make_trainer(tmp_path, energy, best, enable_checkpointing=True, log_every_n_steps=5, logger=logger)
    trainer.fit(Model(step_s=0.01), loader(80))
    logged = [float(row[keys.STEP_J]) for row in rows_of(logger) if row.get(keys.STEP_J)]
    assert float(best.best_model_score) in [pytest.approx(value, rel=1e-6) for value in logged]
    assert min(logged) > 0.9 * 0.01 * (GPU.low_w + NPU.low_w)  # no step is shorter, no board draws less


def test_two_meters_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `EnergyMeter`"):
        make_trainer(tmp_path, meter(), meter())


# --- sensors that are not there, or go


def test_without_a_sensor_there_is_one_warning_and_no_energy(tmp_path, caplog):
    class Nothing(SimulatedSource):
        def boards(self):
            raise npu.PowerUnavailableError("The board is not here.", remedy="plug it in")

    energy, logger = meter(Nothing([SimulatedBoard(1.0)])), CSVLogger(tmp_path)
    with caplog.at_level(logging.WARNING, logger="lightning_npu"):
        make_trainer(tmp_path, energy, logger=logger, log_every_n_steps=1).fit(Model(), loader(8), loader(4))
    assert len(caplog.records) == 1
    assert "The board is not here" in caplog.text
    assert not any(key.startswith("energy/") for row in rows_of(logger) for key in row)
    report = read_report(energy.path)
    assert report["total"] is None
    assert report["per_sample_j"] is None
    assert report["samples"] == 16
    assert report["phases"]["train"] == {"seconds": report["phases"]["train"]["seconds"], "energy_j": None}
    (reason,) = report["no_power_sensor"].values()
    assert "The board is not here" in reason
    with pytest.raises(RuntimeError, match="Early stopping conditioned on metric `energy/total_j` which is not avail"):
        make_trainer(tmp_path, meter(Nothing([SimulatedBoard(1.0)])), EarlyStopping(keys.TOTAL_J)).fit(
            Model(), loader(8)
        )


def test_the_look_ahead_has_its_axis_where_no_board_can_be_read(tmp_path):
    class Policy(Model):
        def __init__(self):
            super().__init__()
            self.layer = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(torch.nn.Linear(SIZE, SIZE), latency_s=0.0))
            self.head = torch.nn.Linear(SIZE, SIZE)

        def loss(self, batch):
            return torch.nn.functional.mse_loss(self.head(self.layer(batch[0])), batch[1])

    logger, policy = CSVLogger(tmp_path), Policy()
    make_trainer(tmp_path, npu.EnergyMeter(sources=[]), logger=logger, log_every_n_steps=1).fit(policy, loader(40))
    policy.layer.close()
    rows = [row for row in rows_of(logger) if row.get(keys.HIT_RATE)]
    seconds = [float(row[keys.ELAPSED_S]) for row in rows]
    assert len(seconds) > 10
    assert seconds == sorted(set(seconds))
    assert not any(row.get(keys.TOTAL_J) for row in rows)


def test_the_report_says_which_part_is_unmetered(tmp_path, caplog, compiled, monkeypatch):
    """Training and the encoder's INT8 artifact both run on a processor whose counter may not be read."""
    from lightning_npu.power import rapl

    monkeypatch.setattr(rapl.RaplSource, "boards", lambda self: _deny())

    class Policy(Model):
        def __init__(self, *extra):
            super().__init__()
            self.encoder = npu.NPUFrozenModule(compiled, runtime_options={"threads": 1})
            for number, module in enumerate(extra):
                self.add_module(f"device{number}", module)

    energy = npu.EnergyMeter()
    with caplog.at_level(logging.WARNING, logger="lightning_npu"):
        make_trainer(tmp_path, energy, max_epochs=1).fit(Policy(), loader(8))
    report = read_report(energy.path)
    assert report["total"] is None
    assert list(report["no_power_sensor"]) == ["cpu (training, encoder)"]
    assert "No permission" in report["no_power_sensor"]["cpu (training, encoder)"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]

    caplog.clear()
    runtime = SimulatedRuntime(make_encoder(), latency_s=0.0, active_w=9.0, idle_w=3.0)
    energy = npu.EnergyMeter()
    with caplog.at_level(logging.WARNING, logger="lightning_npu"):
        make_trainer(tmp_path, energy, max_epochs=1).fit(Policy(npu.NPUFrozenModule.from_runtime(runtime)), loader(8))
    runtime.close()
    assert total_j(energy.report) > 0
    assert list(energy.report["no_power_sensor"]) == ["cpu (training, encoder)"]
    (record,) = caplog.records
    assert "do not compare" in record.message
    assert "cpu (training, encoder): " in record.message


def _deny():
    raise npu.PowerUnavailableError("No permission to read the counter.", remedy="ask root")


def test_a_board_that_is_lost_on_the_way(tmp_path, truth):
    class Lossy(SimulatedSource):
        gone = False

        def read(self, board, *, power=True):
            if self.gone and board.kind == "npu":
                return Reading(time.monotonic(), problem="gone", lost=True)
            return super().read(board, power=power)

    source = Lossy(boards()._specs)

    class Lose(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            source.gone = trainer.current_epoch == 1

    energy, logger = meter(source), CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, energy, Lose(), logger=logger, log_every_n_steps=1, max_epochs=2)
    trainer.fit(Model(step_s=0.02), loader(80))
    report = read_report(energy.path)
    assert report["by_kind"]["gpu"]["state"] == "ok"
    assert report["by_kind"]["npu"]["state"].startswith("lost")
    assert report["total"]["coverage"] < 0.9
    (lost,) = [board for board in report["boards"].values() if board["kind"] == "npu"]
    (time_s, text), *_ = lost["health"]["events"]
    assert text == "lost: gone"
    assert 0 < time_s < report["elapsed_s"]
    assert report["by_kind"]["npu"]["energy_j"] > 0
    assert sum(phase["energy_j"] for phase in report["phases"].values()) == pytest.approx(total_j(report), rel=1e-6)
    late = [row for row in rows_of(logger) if row.get("step", 0) > 30 and keys.GPU_POWER_W in row]
    assert late
    assert not any(keys.BOARD_POWER_W in row for row in late), "a sum without the lost board would look like a saving"


# --- ends that are no ends


class Bang(Exception):
    """What the tests throw."""


@pytest.mark.parametrize("where", ["training_step", "validation_step", "on_train_epoch_end"])
def test_after_an_error_the_file_is_there(tmp_path, where, truth):
    class Failing(Model):
        def training_step(self, batch, index):
            if where == "training_step" and index == 5:
                raise Bang("in the step")
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            if where == "validation_step":
                raise Bang("in the validation")

        def on_train_epoch_end(self):
            if where == "on_train_epoch_end":
                raise Bang("in the epoch's end")

    energy = meter(boards(counter=False))
    trainer = make_trainer(tmp_path, energy)
    with pytest.raises(Bang):
        trainer.fit(Failing(step_s=0.01), loader(), loader(8))
    report = read_report(energy.path)
    assert report["ended"].startswith("Bang: in the ")
    assert abs(total_j(report) - truth.energy_j()) <= report["total"]["uncertainty_j"]
    assert sum(phase["energy_j"] for phase in report["phases"].values()) == pytest.approx(total_j(report), rel=1e-6)
    assert report["samples"] == (20 if where == "training_step" else 40)
    assert (tmp_path / "power_trace.csv").exists()
    assert "save_checkpoint" not in vars(trainer)
    assert not list(tmp_path.glob(".*"))


def test_ctrl_c_and_sigterm(tmp_path):
    for number, (name, leave) in enumerate({"SIGINT": SystemExit, "SIGTERM": BaseException}.items(), start=1):

        class Killed(Model):
            def training_step(self, batch, index, name=name):
                if index == 3:
                    os.kill(os.getpid(), getattr(signal, name))
                return super().training_step(batch, index)

        energy = meter()
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(leave):
                make_trainer(tmp_path / name, energy).fit(Killed(step_s=0.01), loader())
        finally:
            signal.signal(signal.SIGINT, handler)
        report = read_report(tmp_path / name / "energy.json")
        assert report["ended"].split(":")[0] == {1: "KeyboardInterrupt", 2: "SIGTERMException"}[number]
        assert total_j(report) > 0


def test_the_training_that_fails_before_it_begins(tmp_path):
    class Failing(Model):
        def configure_optimizers(self):
            raise Bang

    energy = meter()
    with pytest.raises(Bang):
        make_trainer(tmp_path, energy).fit(Failing(), loader())
    assert energy.report is None
    assert energy.path is None


# --- checkpoints


def counted(report: dict[str, Any]) -> tuple[int, int]:
    return report["samples"], report["optimizer_steps"]


@pytest.mark.parametrize("middle", [True, False])
def test_a_resumed_run_goes_on_counting(tmp_path, middle, truth):
    saver = ModelCheckpoint(
        tmp_path / "saved", save_top_k=-1, **({"every_n_train_steps": 15} if middle else {"every_n_epochs": 1})
    )
    first = meter()
    trainer = make_trainer(tmp_path, first, saver, enable_checkpointing=True, max_epochs=2)
    trainer.fit(Model(step_s=0.005), loader(), loader(4))
    path = next((tmp_path / "saved").glob("*step=15*" if middle else "*step=20*"))
    state = torch.load(path, weights_only=True)["callbacks"]["EnergyMeter"]
    saved = state["account"]
    assert (saved["samples"], saved["steps"]) == ((60, 15) if middle else (80, 20))
    phases = sum(board["energy_j"] for phase in saved["phases"].values() for board in phase.values())
    assert phases == pytest.approx(sum(board["energy_j"] for board in saved["totals"].values()), rel=1e-6)

    other = SimulatedSource([SimulatedBoard(30.0, name="elsewhere", kind="npu", counter=True)])
    second = meter(other)
    trainer = make_trainer(tmp_path, second, EarlyStopping(keys.PER_SAMPLE_J, patience=99), max_epochs=3)
    trainer.fit(Model(step_s=0.005), loader(), loader(4), ckpt_path=path)
    report = read_report(second.path)
    assert trainer.global_step >= 30, "older Lightning repeats a batch"
    assert counted(report) == (4 * trainer.global_step, trainer.global_step)
    assert len(report["boards"]) == 3
    saved_j = sum(board["energy_j"] for board in saved["totals"].values())
    elsewhere = next(board for key, board in report["boards"].items() if "elsewhere" in key)
    assert elsewhere["energy_j"] == pytest.approx(30.0 * (report["elapsed_s"] - saved["elapsed_s"]), rel=0.02)
    assert total_j(report) == pytest.approx(saved_j + elsewhere["energy_j"])
    assert sum(phase["energy_j"] for phase in report["phases"].values()) == pytest.approx(total_j(report), rel=1e-6)
    assert report["elapsed_s"] > saved["elapsed_s"]
    assert report["earlier"] == {
        "elapsed_s": saved["elapsed_s"], "samples": saved["samples"], "optimizer_steps": saved["steps"],
        "energy_j": pytest.approx(saved_j),
    }  # fmt: skip
    assert read_report(first.path)["earlier"] is None


def test_checkpoints_of_others_are_loaded(tmp_path, caplog):
    old = make_trainer(tmp_path, max_epochs=1)
    old.fit(Model(), loader())
    old.save_checkpoint(tmp_path / "old.ckpt")
    energy = meter()
    make_trainer(tmp_path, energy, max_epochs=1).fit(Model(), loader(8))
    make_trainer(tmp_path, energy, max_epochs=2).fit(Model(), loader(), ckpt_path=tmp_path / "old.ckpt")
    assert counted(energy.report) == (40, 10), "neither the other training's energy, nor its steps"
    with caplog.at_level(logging.WARNING, logger="lightning_npu"):
        saved = energy.state_dict()["account"]
        for wrong in ({"totals": {}}, None, [], saved | {"phases": []}, saved | {"samples": "many"}):
            energy.load_state_dict({"account": wrong})
    assert caplog.text.count("counting begins anew") == 5
    assert energy.state_dict()["account"]["samples"] == 40


def test_a_checkpoint_that_the_user_saves_is_a_phase(tmp_path):
    class Saving(Model):
        def on_train_batch_end(self, outputs, batch, index):
            if index == 4:
                self.trainer.save_checkpoint(tmp_path / "own.ckpt")

    energy = meter()
    make_trainer(tmp_path, energy, max_epochs=1).fit(Saving(), loader())
    assert energy.report["phases"]["checkpoint"]["energy_j"] > 0
    assert torch.load(tmp_path / "own.ckpt", weights_only=True)["callbacks"]["EnergyMeter"]["account"]["samples"] == 20


# --- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": boards}, "put them into a list"),
        ({"sources": "nvml"}, r"write sources=\['nvml'\]"),
        ({"sources": ["no such"]}, "There is no power source named 'no such'"),
        ({"prefetch": True}, "expected|Expected: 'auto', a depth, a Prefetch, or False"),
        ({"prefetch": -1}, "depth"),
        ({"interval_s": 0}, "cannot be read at that interval"),
        ({"rolling_s": "1"}, "rolling_s is not a number"),
        ({"rolling_s": 0}, "seconds above 0"),
        ({"rolling_s": 31.0}, "up to 30"),
        ({"over_energy": None}, "over_energy is wrong"),
        ({"over_energy": [3]}, "over_energy is wrong"),
        ({"sync": "always"}, "'epoch', 'step' or 'never'"),
        ({"prefix": "npu/"}, "prefix is wrong"),
        ({"samples": 4}, "samples is wrong"),
        ({"idle_power_w": "guess"}, "idle"),
        ({"calibration": {"gpu": {"gains": 1.0}}}, "gain"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(options, message):
    with pytest.raises(npu.InputError, match=message):
        npu.EnergyMeter(**options)


@pytest.mark.parametrize("given", [None, "x", -1, 2.5, math.nan, math.inf, torch.ones(2)])
def test_samples_that_are_no_number_are_told(tmp_path, given):
    with pytest.raises(npu.InputError, match=r"samples\(batch\) gave no number of samples(.|\n)*EnergyMeter\(samples="):
        make_trainer(tmp_path, meter(samples=lambda batch: given)).fit(Model(), loader(8))
    assert whole(torch.tensor(3)) == whole(3.0) == 3


def test_prefix_and_samples(tmp_path):
    energy, logger = meter(prefix="robot/", samples=lambda batch: 7), CSVLogger(tmp_path)
    stop = EarlyStopping("robot/per_sample_j")
    make_trainer(tmp_path, energy, stop, logger=logger, max_epochs=1).fit(Model(), loader())
    assert energy.report["samples"] == 70
    logged = {key for row in rows_of(logger) for key in row} - {"epoch", "step"}
    assert logged
    assert all(keys.is_logged(key, "robot/") for key in logged)


def test_rows_of_a_dataset_are_what_the_tests_think():
    assert sum(len(x) for x, _ in loader(38)) == 38 == len(Rows(38))
