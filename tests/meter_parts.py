"""What the tests of the energy meter share: boards whose power is known exactly, models, trainers, and the truth."""

from __future__ import annotations

import contextlib
import csv
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_npu as npu
from lightning_npu.metering.phases import Phases, Span
from lightning_npu.metering.recorder import Recorder
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource, SquareWave

GPU = SquareWave(50.0, 180.0, 0.37)
NPU = SquareWave(8.0, 25.0, 0.23)
SIZE = 6


def boards(**options: Any) -> SimulatedSource:
    """A GPU and an NPU, both with counters that are never late."""
    settings = {"counter": True, **options}
    return SimulatedSource(
        [
            SimulatedBoard(GPU, name="g", kind="gpu", **settings),
            SimulatedBoard(NPU, name="n", kind="npu", **settings),
        ]
    )


class Rows(Dataset[Any]):
    """``count`` samples; batches of any shape are made by the collate function."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (torch.randn(count, SIZE, generator=generator) for _ in range(2))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, count: int) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


def loader(count: int = 40, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(count), **{"batch_size": 4, "shuffle": True, **options})


class Model(pl.LightningModule):
    """Keeps what it saw, and takes some time for each step."""

    def __init__(self, step_s: float = 0.0, validation_s: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.step_s, self.validation_s = step_s, validation_s
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.mse_loss(self.layer(x), y)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append((float(loss), float(torch.rand(()))))
        until_s = time.monotonic() + self.step_s
        while time.monotonic() < until_s:
            time.sleep(0.001)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        until_s = time.monotonic() + self.validation_s
        while time.monotonic() < until_s:
            time.sleep(0.001)
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    if options.get("barebones"):
        settings = {"accelerator": "cpu", "max_epochs": 2}
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**settings, **options})


class Truth:
    """Follows the recorders of a test: when runs began and ended, and in which phase they were when."""

    def __init__(self, monkeypatch: Any) -> None:
        self.spans: list[Span] = []
        self.windows: list[tuple[float, float]] = []
        truth = self
        add, stop = Phases._add, Recorder.stop

        def spy_add(phases: Phases, span: Span) -> None:
            truth.spans.append(span)
            add(phases, span)

        def spy_stop(recorder: Recorder, timeout_s: float = 0.5) -> None:
            stop(recorder, timeout_s)
            window = recorder._whole
            if (
                window is not None
                and window.ended_s is not None
                and (window.started_s, window.ended_s) not in self.windows
            ):
                truth.windows.append((window.started_s, window.ended_s))

        monkeypatch.setattr(Phases, "_add", spy_add)
        monkeypatch.setattr(Recorder, "stop", spy_stop)

    def energy_j(self) -> float:
        """Exact energy of all runs."""
        return sum(true_j(*window) for window in self.windows)

    def phase_j(self, phase: str) -> float:
        """Exact energy of one phase of all runs."""
        return sum(true_j(span.start_s, span.end_s) for span in self.spans if span.phase == phase)


def true_j(start_s: float, end_s: float) -> float:
    """Exact energy of both boards."""
    return GPU.energy_j(start_s, end_s) + NPU.energy_j(start_s, end_s)


def read_report(path: Path | None) -> dict[str, Any]:
    """``energy.json``, which must be JSON as others read it: without NaN."""
    assert path is not None

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return content


def rows_of(logger: Any) -> list[dict[str, float]]:
    """What a CSVLogger wrote, row by row, without empty cells."""
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: float(text) for key, text in row.items() if text} for row in csv.DictReader(file)]


def left_behind() -> list[str]:
    """Threads and processes of power sensors that go on."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_npu.power")]
    commands = []
    for file in Path("/proc/self/task").glob("*/children"):
        for child in file.read_text().split():
            with contextlib.suppress(OSError):
                commands.append(Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "))
    return threads + [command for command in commands if "lightning_npu" in command]


def total_j(report: dict[str, Any]) -> float:
    return float(report["total"]["energy_j"])


def meter(*sources: Any, **options: Any) -> npu.EnergyMeter:
    return npu.EnergyMeter(sources=list(sources) or [boards()], **options)
