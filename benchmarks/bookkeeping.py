"""What looking ahead costs the training thread, per batch, in CPU time of that thread.

    python benchmarks/bookkeeping.py

The same loop over batches of six tensors calls a frozen module on a SIMULATED device without latency, in turns with
and without Lookahead; the medians' difference is the bookkeeping: reading ahead, tags, submitting, redeeming.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.runtimes import SimulatedRuntime


class Encoder(nn.Module):
    """Cheap: the device is simulated."""

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, 32, 32) to (N, 3)."""
        return images.mean((2, 3))


def thread_s(batches: Iterable[Any], encoder: nn.Module) -> float:
    """Seconds of this thread's CPU per batch."""
    count, started = 0, time.thread_time()
    for batch in batches:
        encoder(batch["images"])
        count += 1
    return (time.thread_time() - started) / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    encoder = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(Encoder(), latency_s=0.0))
    names = ("images", "state", "actions", "valid", "task", "index")
    batches = [
        {name: torch.rand(8, 3, 32, 32) if name == "images" else torch.rand(8, 16) for name in names}
        for _ in range(args.batches)
    ]
    plain_s, ahead_s = [], []
    for _ in range(args.rounds):
        plain_s.append(thread_s(batches, encoder))
        with npu.Lookahead(batches, encoder, depth=2) as loader:
            ahead_s.append(thread_s(loader, encoder))
    extra = statistics.median(b - a for a, b in zip(plain_s, ahead_s, strict=True))
    print(f"plain {statistics.median(plain_s) * 1e6:.0f} us, looking ahead {statistics.median(ahead_s) * 1e6:.0f} us")
    print(f"bookkeeping on the training thread: {extra * 1e6:.0f} us per batch of {len(names)} tensors")
    encoder.close()


if __name__ == "__main__":
    main()
