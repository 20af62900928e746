"""The bridge on digits that were rotated: an adapter before a frozen INT8 encoder, trained through the encoder.

    python benchmarks/bridge_digits.py

A small network learns upright digits (scikit-learn's, 8x8). Its encoder is compiled to INT8 by this package and runs on
ONNX Runtime; its head stays frozen, too. Then the digits come rotated by 30 degrees. An adapter (64 to 64, 4,160
parameters, identity at first) is put before the encoder and trained through the INT8 path alone, m = 1: three forward
calls a step. Beside it: nothing done, the head alone retrained on INT8 features, and the adapter trained by
backpropagation through the FP32 twin of the encoder, judged on INT8. Each learning rate is the best of three on a
validation split of the adaptation digits, per seed; the test digits are looked at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.forward_gradient import Bridge

RATES = (1e-3, 3e-3, 1e-2)
BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in [0, 1] and labels (n,): upright to pretrain, rotated to adapt, to validate, to test."""

    upright: tuple[Tensor, Tensor]
    adapt: tuple[Tensor, Tensor]
    validate: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(seed: int, degrees: float = 30.0) -> Digits:
    """700, 480, 120 and 497 digits, no image in two of them; ``seed`` decides which."""
    from scipy.ndimage import rotate
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    rotated = np.stack([rotate(image, degrees, reshape=False, order=1) for image in images])
    order = np.random.default_rng(seed).permutation(len(labels))

    def take(source: np.ndarray, first: int, last: int) -> tuple[Tensor, Tensor]:
        chosen = order[first:last]
        return torch.tensor(source[chosen], dtype=torch.float32)[:, None], torch.tensor(labels[chosen])

    return Digits(
        take(images, 0, 700), take(rotated, 700, 1180), take(rotated, 1180, 1300), take(rotated, 1300, len(labels))
    )


class Encoder(nn.Sequential):
    """Two convolutions: (n, 1, 8, 8) to (n, 144)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()
        )


class Adapter(nn.Module):
    """A linear map of the image's 64 pixels, the identity at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(64))
            self.linear.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, 1, 8, 8) to (n, 1, 8, 8)."""
        return self.linear(images.flatten(1)).view_as(images)


def pretrain(digits: Digits, seed: int, steps: int = 1500) -> tuple[Encoder, nn.Linear]:
    """Encoder and head, trained on upright digits and frozen."""
    torch.manual_seed(seed)
    encoder, head = Encoder(), nn.Linear(144, 10)
    descend(nn.Sequential(encoder, head), digits.upright, steps, 3e-3, seed)
    return encoder.eval().requires_grad_(False), head.requires_grad_(False)


def descend(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, rate: float, seed: int) -> None:
    """Adam on what requires grad, cosine schedule; knows nothing of how gradients come about."""
    images, labels = data
    draw = torch.Generator().manual_seed(seed + 1000)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Percent."""
    return 100 * float((model(data[0]).argmax(1) == data[1]).float().mean())


def compile_encoder(encoder: Encoder, digits: Digits, folder: Path) -> npu.Artifact:
    """The INT8 artifact, calibrated on upright digits."""
    batches = list(digits.upright[0][:640].split(BATCH))
    return npu.compile_module(encoder, (batches[0],), calibration=batches, output=folder / "encoder.npu")


def best(make: Callable[[float], Callable[[tuple[Tensor, Tensor]], float]], digits: Digits) -> tuple[float, float]:
    """Train with each rate; the test accuracy of the one that validates best, and the rate."""
    judged = [(judge(digits.validate), rate, judge) for rate in RATES if (judge := make(rate)) is not None]
    _, rate, judge = max(judged, key=lambda entry: entry[0])
    return judge(digits.test), rate


def run(seed: int, steps: int = 1000) -> dict[str, object]:
    """All routes for one seed: percent on the test digits, the rates, and what the bridge took."""
    digits = load(seed)
    encoder, head = pretrain(digits, seed)
    figures: dict[str, object] = {"seed": seed, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        artifact = compile_encoder(encoder, digits, Path(folder))
        frozen = npu.NPUFrozenModule(artifact)
        figures["nothing"] = accuracy(nn.Sequential(frozen, head), digits.test)
        taken: dict[float, dict[str, object]] = {}

        def bridged(rate: float) -> Callable[[tuple[Tensor, Tensor]], float]:
            through = npu.NPUFrozenModule(artifact, gradient=Bridge(m=1, seed=seed))
            model = nn.Sequential(Adapter(), through, head)
            began = time.perf_counter()
            descend(model, digits.adapt, steps, rate, seed)
            taken[rate] = {"seconds": time.perf_counter() - began, **through.stats["gradient"]}
            return lambda data: accuracy(model, data)

        def bridged_with_head(rate: float) -> Callable[[tuple[Tensor, Tensor]], float]:
            free = nn.Linear(144, 10)
            free.load_state_dict(head.state_dict())
            model = nn.Sequential(Adapter(), npu.NPUFrozenModule(artifact, gradient=Bridge(m=1, seed=seed)), free)
            descend(model, digits.adapt, steps, rate, seed)
            return lambda data: accuracy(model, data)

        def head_alone(rate: float) -> Callable[[tuple[Tensor, Tensor]], float]:
            free = nn.Linear(144, 10)
            free.load_state_dict(head.state_dict())
            model = nn.Sequential(frozen, free)
            descend(model, digits.adapt, steps, rate, seed)
            return lambda data: accuracy(model, data)

        def oracle(rate: float) -> Callable[[tuple[Tensor, Tensor]], float]:
            adapter = Adapter()
            descend(nn.Sequential(adapter, encoder, head), digits.adapt, steps, rate, seed)
            return lambda data: accuracy(nn.Sequential(adapter, frozen, head), data)

        figures["head alone"], figures["head alone, rate"] = best(head_alone, digits)
        figures["bridge"], rate = best(bridged, digits)
        figures["bridge, rate"] = rate
        figures["bridge, took"] = taken[rate]
        figures["bridge and head"], figures["bridge and head, rate"] = best(bridged_with_head, digits)
        figures["oracle"], figures["oracle, rate"] = best(oracle, digits)
        frozen.close()
    return figures


def main() -> None:
    """Print a line per seed and the table of means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=1000, help="three forward calls each (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(args.seeds):
        rows.append(run(seed, args.steps))
        print(json.dumps(rows[-1]), flush=True)
    print(f"\n{args.seeds} seeds, {args.steps} steps of {BATCH}, test accuracy in percent, mean +- standard deviation")
    for name in ("nothing", "head alone", "bridge", "bridge and head", "oracle"):
        values = np.array([row[name] for row in rows], dtype=float)
        print(f"{name:16} {values.mean():5.1f} +- {values.std(ddof=1) if len(values) > 1 else 0.0:.1f}")


if __name__ == "__main__":
    main()
