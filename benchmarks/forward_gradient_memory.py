"""Peak resident memory of one way to run a ViT-tiny, in bytes: inference, forward, fixed16, fixed8, backward.

Run by benchmarks/forward_gradient.py, each in a process of its own; Linux with glibc only. The peak counts from before
the network is made, so its weights are in it, and libraries are not. Three steps are taken, the highest counts. Large
blocks are given back to the system as they are freed (MALLOC_MMAP_THRESHOLD_), so that the allocator's hoard does not
count; with it, figures vary by 15 %.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_npu.forward_gradient import FixedPoint, ForwardGradient

FIXED = {"fixed16": FixedPoint(16), "fixed8": FixedPoint(8, rounding="error_feedback")}
_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


class ViTTiny(nn.Module):
    """Patches of 16 x 16, 12 layers of width 192, 5.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, 16)
        self.position = nn.Parameter(torch.zeros(1, 196, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 224, 224) to (N, 10)."""
        return self.head(self.layers(self.patches(x).flatten(2).mT + self.position).mean(1))


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def main() -> None:
    """Print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["inference", "forward", *FIXED, "backward"])
    mode = parser.parse_args().mode
    if _THRESHOLD not in os.environ:  # read when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, _THRESHOLD: str(64 << 10)})
    torch.set_num_threads(1)
    x, y = torch.randn(8, 3, 224, 224), torch.randint(10, (8,))
    ForwardGradient([torch.zeros(2)], 0.1).step(lambda: 1.0)  # what is loaded on first use is not training's
    nn.functional.linear(torch.zeros(2, 2), torch.zeros(2, 2))
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
    net = ViTTiny()

    def loss() -> Tensor:
        return nn.functional.cross_entropy(net(x), y)

    if mode == "inference":
        with torch.no_grad():
            for _ in range(3):
                loss()
    elif mode == "backward":
        adam = torch.optim.SGD(net.parameters(), lr=1e-3)  # without Adam's two buffers
        for _ in range(3):
            adam.zero_grad()
            loss().backward()
            adam.step()
    else:
        optimizer = ForwardGradient(net.parameters(), 1e-3, eps=1e-2, m=1, fixed_point=FIXED.get(mode))
        for _ in range(3):
            optimizer.step(loss)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main()
