"""How much of the accelerator's time the training step hides, beside what is physically possible.

    python benchmarks/overlap.py            # every cell, five interleaved repeats: about 20 minutes
    python benchmarks/overlap.py --quick    # three ratios, two repeats

A Lightning Trainer runs a step of a known length (it sleeps as a thread that waits for a GPU does, or with --python
computes in Python and holds the interpreter lock) with a frozen encoder on a SIMULATED device of a stated latency,
which replays its answers and takes no CPU. Overlap efficiency is max(T_train, T_npu) / T_step. T_train and T_npu are
each measured in the same process with the other side answering at once. "limit" is what an ideal pipeline of that depth
reaches with the same jitter, by discrete-event simulation; "serial" waits for every batch.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_npu as npu
from lightning_npu.runtimes import SimulatedRuntime

BATCH = 8
DEPTHS: tuple[int | str, ...] = (0, 1, 2, 4, "auto")


class Encoder(nn.Module):
    """Small: the device is simulated, and its answers are replayed."""

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, 32, 32) to (N, 192) means over patches."""
        return nn.functional.avg_pool2d(images, 4).flatten(1)


class Policy(pl.LightningModule):
    """Spends ``train_s`` seconds per step."""

    def __init__(self, encoder: nn.Module, train_s: float, *, python: bool) -> None:
        super().__init__()
        self.encoder, self.train_s, self.python = encoder, train_s, python
        self.head = nn.Linear(192, 2)
        self.stamps: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        """One step."""
        features = self.encoder(batch[0])
        ends = time.perf_counter() + self.train_s
        if self.python:
            while time.perf_counter() < ends:
                sum(range(200))
        elif self.train_s:
            time.sleep(self.train_s)
        return self.head(features).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.head.parameters(), lr=0.01)


def step_s(
    train_s: float, npu_s: float, jitter: float, depth: int | str, steps: int, *, python: bool, seed: int
) -> float:
    """Mean seconds per step once the pipeline runs."""
    encoder = npu.NPUFrozenModule.from_runtime(
        SimulatedRuntime(Encoder(), latency_s=npu_s, jitter=jitter, replay=True, seed=seed)
    )
    policy = Policy(encoder, train_s, python=python)
    data = TensorDataset(torch.rand(BATCH, 3, 32, 32).repeat(steps, 1, 1, 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[npu.Prefetch(depth)],
    )
    trainer.fit(policy, DataLoader(data, batch_size=BATCH))
    encoder.close()
    warm = steps // 5
    return (policy.stamps[-1] - policy.stamps[warm]) / (len(policy.stamps) - 1 - warm)


def limit(train_s: float, npu_s: float, jitter: float, depth: int, steps: int = 20_000) -> float:
    """Efficiency of an ideal pipeline: one in-order device, ``depth`` batches asked for ahead, no other cost."""
    random = np.random.default_rng(0)
    device = npu_s * np.exp(random.normal(0.0, jitter, steps)) if jitter else np.full(steps, npu_s)
    asked, ready, free = np.zeros(steps), np.zeros(steps), 0.0
    now = 0.0
    for index in range(steps):
        for ahead in range(index, min(steps, index + depth + 1)) if index == 0 else (index + depth,):
            if ahead < steps:
                asked[ahead] = now
                free = max(free, now) + device[ahead]
                ready[ahead] = free
        now = max(now, ready[index]) + train_s
    return max(train_s, float(device.mean())) / (now / steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--python", action="store_true", help="a step that holds Python's interpreter lock")
    parser.add_argument("--ratios", type=float, nargs="+", help="T_npu/T_train; default: seven from 0.25 to 4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ratios = args.ratios or ((0.5, 1.0, 2.0) if args.quick else (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0))
    repeats = 2 if args.quick else args.repeats
    train_s = args.train_ms / 1e3
    kind = "Python, holding the interpreter lock" if args.python else "a sleep, as waiting for a GPU"
    print(f"SIMULATED device. Training step {args.train_ms:g} ms ({kind}), batch {BATCH}, {repeats} repeats\n")
    columns = ("T_npu/T_train", "jitter", "serial", "depth 1", "depth 2", "depth 4", "auto", "spread of auto")
    print(f"| {' | '.join(columns)} | limit at 2 | limit at 8 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for ratio in ratios:
        for jitter in (0.0, 0.2):
            efficiency: dict[int | str, list[float]] = {depth: [] for depth in DEPTHS}
            for repeat in range(repeats):
                common: dict[str, Any] = {"python": args.python, "seed": repeat}
                alone = step_s(train_s, 0.0, 0.0, 0, args.steps, **common)
                device = step_s(0.0, ratio * train_s, jitter, 8, args.steps, **{**common, "python": False})
                for depth in DEPTHS:
                    step = step_s(train_s, ratio * train_s, jitter, depth, args.steps, **common)
                    efficiency[depth].append(max(alone, device) / step)
            cells = " | ".join(f"{statistics.median(efficiency[depth]):.3f}" for depth in DEPTHS)
            auto = efficiency["auto"]
            limits = " | ".join(f"{limit(train_s, ratio * train_s, jitter, depth):.3f}" for depth in (2, 8))
            print(f"| {ratio:g} | {jitter:.0%} | {cells} | {min(auto):.3f} to {max(auto):.3f} | {limits} |", flush=True)


if __name__ == "__main__":
    main()
