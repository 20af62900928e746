"""What ``NPUFrozenModule.forward`` costs beyond the bare runtime call: structure, checks, hand-over to the worker.

    python benchmarks/forward_overhead.py

The same artifact is called three ways in turn, round by round, in one process: the bare runtime, the worker, the
module. Medians of the paired differences are printed. Copies that a call needs (none for a contiguous float32 CPU
input) are counted by the module itself and printed by name.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import lightning_npu as npu


class Tokens(nn.Module):
    """A small encoder with the output of one paper-size layer: keys, values and tokens of 300 x 512."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 512, 16, 16)
        self.key, self.value = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images (N, 3, 240, 320) to three tensors (N, 300, 512)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.key(tokens), self.value(tokens), tokens


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1)
    rounds, batch = parser.parse_args().rounds, parser.parse_args().batch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Tokens().eval()
    images = torch.rand(batch, 3, 240, 320)
    with tempfile.TemporaryDirectory() as folder:
        artifact = npu.compile_module(
            module, (images,), calibration=[torch.rand(8, 3, 240, 320)], output=Path(folder) / "tokens.npu"
        )
        frozen = npu.NPUFrozenModule(artifact, runtime_options={"threads": 1})
        frozen(images)
        worker = frozen._worker
        runtime = worker.runtime
        ways: dict[str, Callable[[], object]] = {
            "bare runtime": lambda: runtime.run([images]),
            "through the worker": lambda: worker.submit([images]).result(),
            "NPUFrozenModule": lambda: frozen(images),
        }
        for call in ways.values():
            call()
        times = {name: [0.0] * rounds for name in ways}
        for index in range(rounds):
            for name, call in ways.items():
                times[name][index] = seconds(call)
        bare = times["bare runtime"]
        print(f"batch {batch}, {rounds} interleaved rounds, 1 thread, {runtime.device}")
        for name, values in times.items():
            extra = statistics.median(v - b for v, b in zip(values, bare, strict=True)) * 1e6
            print(f"{name:<20} median {statistics.median(values) * 1e3:8.3f} ms   over the bare call {extra:7.1f} us")
        print(f"copies: {frozen.stats['copies'] or 'none'}")
        frozen.close()


if __name__ == "__main__":
    main()
