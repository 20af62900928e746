"""Time per sample with a SIMULATED accelerator that is too slow, with and without ``Prefetch(balance="auto")``.

    python benchmarks/balance.py

The training device is simulated by sleeping: a step trains for 12 ms, and encoding a batch there takes 8 ms, 20 ms in
all ("GPU only"). The accelerator takes 1.15 to 4 times that per batch. Powers are stated, not measured. Everything runs
in one process, in interleaved repeats; medians.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_npu as npu
from lightning_npu.runtimes import SimulatedRuntime

BATCH, HEAD_S, ENCODE_S = 8, 0.012, 0.008
GPU_ACTIVE_W, GPU_IDLE_W, NPU_ACTIVE_W, NPU_IDLE_W = 150.0, 20.0, 18.0, 15.5


class Encoder(nn.Module):
    """Means over patches; sleeps first where it stands for the encoder on the training device."""

    def __init__(self, encode_s: float = 0.0) -> None:
        super().__init__()
        self.encode_s, self.calls = encode_s, 0

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, 32, 32) to (N, 192)."""
        self.calls += 1
        if self.encode_s:
            time.sleep(self.encode_s)
        return nn.functional.avg_pool2d(images, 4).flatten(1)


class Policy(pl.LightningModule):
    """Trains for ``HEAD_S`` seconds per step."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(192, 2)
        self.stamps: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        """One step."""
        features = self.encoder(batch[0])
        time.sleep(HEAD_S)
        return self.head(features).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.head.parameters(), lr=0.01)


def run(npu_s: float | None, balance: Any, steps: int) -> tuple[float, float, float]:
    """Seconds per sample, SIMULATED joules per sample, share that the accelerator encoded."""
    here = Encoder(ENCODE_S)
    encoder: nn.Module = here
    callbacks: list[pl.Callback] = []
    runtime = None
    if npu_s is not None:
        runtime = SimulatedRuntime(Encoder(), latency_s=npu_s, replay=True, active_w=NPU_ACTIVE_W, idle_w=NPU_IDLE_W)
        encoder = npu.NPUFrozenModule.from_runtime(runtime, reference=here)
        callbacks = [npu.Prefetch(balance=balance)]
    policy = Policy(encoder)
    data = TensorDataset(torch.rand(BATCH, 3, 32, 32).repeat(steps, 1, 1, 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(policy, DataLoader(data, batch_size=BATCH))
    warm = steps // 4
    step_s = (policy.stamps[-1] - policy.stamps[warm]) / (len(policy.stamps) - 1 - warm)
    on_gpu = here.calls / steps
    share = 1.0 - on_gpu
    busy_s = HEAD_S + on_gpu * ENCODE_S
    energy_j = GPU_ACTIVE_W * busy_s + GPU_IDLE_W * max(0.0, step_s - busy_s)
    if npu_s is not None:
        active_s = min(step_s, share * npu_s)
        energy_j += NPU_ACTIVE_W * active_s + NPU_IDLE_W * (step_s - active_s)
        encoder.close()  # type: ignore[operator]
    return step_s / BATCH, energy_j / BATCH, share


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    only_s = HEAD_S + ENCODE_S
    print("SIMULATED training device and accelerator; powers are stated: GPU", GPU_ACTIVE_W, "W active,", GPU_IDLE_W)
    print("W idle; accelerator", NPU_ACTIVE_W, "W active,", NPU_IDLE_W, "W idle. Ratios to GPU only, medians.\n")
    print("| T_npu / GPU-only step | time, off | time, auto | spread | share offloaded | energy, off | energy, auto |")
    print("|---|---|---|---|---|---|---|")
    for ratio in (0.25, 1.15, 1.38, 2.0, 4.0):
        rows = []
        for _ in range(args.repeats):
            base = run(None, "off", args.steps)
            off = run(ratio * only_s, "off", args.steps)
            auto = run(ratio * only_s, "auto", args.steps)
            rows.append((off[0] / base[0], auto[0] / base[0], auto[2], off[1] / base[1], auto[1] / base[1]))
        off_t, auto_t, share, off_e, auto_e = (statistics.median(column) for column in zip(*rows, strict=True))
        spread = f"{min(row[1] for row in rows):.3f} to {max(row[1] for row in rows):.3f}"
        print(
            f"| {ratio:g} | {off_t:.3f} | {auto_t:.3f} | {spread} | {share:.2f} | {off_e:.3f} | {auto_e:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
