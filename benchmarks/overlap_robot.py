"""The robot example's training step and its INT8 encoder on one processor: overlapped, and one after the other.

    python benchmarks/overlap_robot.py

The networks, batch size and optimizer are those of examples/robot_policy (L4, on smooth random images, so that no
simulator is needed). Interleaved repeats of a few dozen steps, medians. "train only" answers from a SIMULATED device
without latency; "encode only" has an empty step; the limit of the overlap is the larger of the two at the same split.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_npu as npu
from lightning_npu.runtimes import SimulatedRuntime
from lightning_npu.runtimes.cpu import available_cores

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "robot_policy"))
from policy import ActionExpert
from stage1 import load_encoder


class Batches(Dataset[Any]):
    """Ready batches: loading costs nothing here."""

    def __init__(self, count: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(count * size, 3, 6, 6, generator=generator)
        self.images = nn.functional.interpolate(coarse, size=96, mode="bilinear").split(size)
        self.state = torch.randn(count, size, 4, generator=generator)
        self.actions = torch.randn(count, size, 16, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.state[index], self.actions[index]


class Policy(L.LightningModule):
    """The example's action expert; with ``empty`` the step only encodes."""

    def __init__(self, encoder: nn.Module, *, empty: bool = False) -> None:
        super().__init__()
        self.encoder, self.expert, self.empty = encoder, ActionExpert(), empty
        self.stamps: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        """L1 loss over the chunk of actions."""
        images, state, actions = batch
        features = self.encoder(images)
        if self.empty:
            return None
        return (self.expert(features, state) - actions).abs().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        """As the example."""
        return torch.optim.AdamW(self.expert.parameters(), 1e-3)


def step_s(encoder: nn.Module, data: Batches, depth: int | str, threads: int, *, empty: bool = False) -> float:
    """Median seconds per step."""
    torch.set_num_threads(threads)
    policy = Policy(encoder, empty=empty)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[npu.Prefetch(depth)],
    )
    trainer.fit(policy, DataLoader(data, batch_size=None))
    gaps = [b - a for a, b in zip(policy.stamps[4:], policy.stamps[5:], strict=False)]
    return sum(gaps) / len(gaps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cores = available_cores()
    half = max(1, cores // 2)
    data = Batches(args.steps, args.batch_size)
    instant = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(load_encoder(), latency_s=0.0, replay=True))
    with tempfile.TemporaryDirectory() as folder:
        artifact = npu.compile_module(
            load_encoder(), (data.images[0],), calibration=data.images, output=Path(folder) / "l4.npu"
        )
        by_threads = {n: npu.NPUFrozenModule(artifact, runtime_options={"threads": n}) for n in {half, cores}}
        ways: dict[str, Any] = {
            f"train only, {cores - half or 1} torch": lambda: step_s(instant, data, 0, cores - half or 1),
            f"encode only, {half} runtime": lambda: step_s(by_threads[half], data, 0, cores - half or 1, empty=True),
            f"overlapped, {half} runtime + {cores - half or 1} torch": lambda: step_s(
                by_threads[half], data, "auto", cores
            ),
        }
        for runtime_threads in sorted({half, cores}):
            for torch_threads in sorted({half, cores}):
                ways[f"serial, {runtime_threads} runtime, {torch_threads} torch"] = (
                    lambda r=runtime_threads, t=torch_threads: step_s(by_threads[r], data, 0, t)
                )
        ways[f"overlapped without a split, {cores} runtime + {cores} torch"] = lambda: step_s(
            by_threads[cores], data, "auto", cores
        )
        step_s(instant, data, 0, half)  # replay from here on
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, way in ways.items():
                times[name].append(way())
        for module in (*by_threads.values(), instant):
            module.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{cores} cores, batch {args.batch_size}, {args.repeats} interleaved repeats of {args.steps} steps, ms per step"
    )
    for name, median in medians.items():
        print(f"{name:<48} {median * 1e3:7.1f}  ({min(times[name]) * 1e3:.1f} to {max(times[name]) * 1e3:.1f})")
    names = list(ways)
    ideal = max(medians[names[0]], medians[names[1]])
    serial = min(value for name, value in medians.items() if name.startswith("serial"))
    print(f"overlap efficiency max(T_train, T_npu) / T_step: {ideal / medians[names[2]]:.3f}")
    print(f"against the best serial order: {serial / medians[names[2]]:.2f} times as fast")


if __name__ == "__main__":
    main()
