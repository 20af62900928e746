"""What ``EnergyMeter`` costs per training step: trainings with and without it, in turns, in one process.

The model does next to nothing, so that a step is Lightning's own work and the meter's. ``--pause-ms`` makes steps
longer without using the processor, to see the cost at other rates. Boards are simulated: reading one costs nothing
here, so that what is measured is the meter. Prints JSON: medians over the rounds, and their quartiles.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_npu as npu
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource, SquareWave


class Small(pl.LightningModule):
    """One linear layer, and a pause."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.pause_s = pause_s
        self.clocks: list[tuple[float, float, float]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Notes when it was called."""
        self.clocks.append((time.perf_counter(), time.thread_time(), time.process_time()))
        if self.pause_s:
            time.sleep(self.pause_s)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The cheapest there is."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def boards(update_s: float) -> SimulatedSource:
    """A GPU and an NPU with counters: threads of this process read them, no helper."""
    return SimulatedSource(
        [
            SimulatedBoard(SquareWave(50, 180, 0.37), name="gpu", kind="gpu", counter=True, update_s=update_s),
            SimulatedBoard(SquareWave(8, 25, 0.23), name="npu", kind="npu", counter=True, update_s=update_s),
        ]
    )


def train(args: argparse.Namespace, *, metered: bool) -> tuple[float, ...]:
    """Milliseconds per step: by the clock, of the training thread's own time, and of all threads'."""
    callbacks = [npu.EnergyMeter(sources=[boards(args.update_s)])] if metered else []
    model = Small(args.pause_ms / 1e3)
    data = DataLoader(TensorDataset(torch.zeros(args.steps * 2, 4)), batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            max_epochs=1,
            logger=CSVLogger(folder),
            log_every_n_steps=args.log_every,
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
    steps = model.clocks[args.steps // 10 :]
    return tuple((last - first) / (len(steps) - 1) * 1e3 for first, last in zip(steps[0], steps[-1], strict=True))


def main() -> None:
    """Run the rounds and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--update-s", type=float, default=0.1, help="how often the boards' counters are renewed")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rounds: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for number in range(args.rounds):
        for metered in (False, True) if number % 2 else (True, False):
            rounds[metered].append(train(args, metered=metered))
    result: dict[str, Any] = {"steps": args.steps, "rounds": args.rounds, "pause_ms": args.pause_ms}
    result |= {"log_every": args.log_every, "update_s": args.update_s}
    for column, name in enumerate(("step_ms", "thread_cpu_ms", "process_cpu_ms")):
        plain, metered = ([measured[column] for measured in rounds[kind]] for kind in (False, True))
        extra = [b - a for a, b in zip(plain, metered, strict=True)]
        low, _, high = statistics.quantiles(extra, n=4)
        result[name] = {
            "without": round(statistics.median(plain), 4),
            "with": round(statistics.median(metered), 4),
            "extra": round(statistics.median(extra), 4),
            "quartiles": [round(low, 4), round(high, 4)],
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
