"""How good the bridge's gradients are, by the size of the input, and what helps.

    python benchmarks/bridge_dimension.py

For encoders on digits (1x8x8), on the robot's camera (3x96x96, examples/robot_policy's own encoder) and on 3x224x224
(a ResNet18), each compiled to INT8 by this package and run on ONNX Runtime: the cosine of the estimated gradient to
that of backpropagation through the FP32 twin, over a batch. "input": of the gradient of the pixels. "correction": of
the gradient that a colour correction before the encoder (3x3 matrix and offset; a gain and an offset for digits)
collects from it over the batch. The loss is a random linear form of the features. Rounding noise is part of what is
measured; "FP32" rows are the same estimate through an FP32 build, which has none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.forward_gradient import Blocks, Bridge, Colour, LowFrequency
from lightning_npu.forward_gradient.structured import Structure

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """An encoder and images for it.

    Attributes:
        name: in the table.
        encoder: FP32, frozen.
        images: (n, channels, height, width), as the encoder takes them.
        batch: samples in each estimate.
    """

    name: str
    encoder: nn.Module
    images: Tensor
    batch: int


def digits() -> Case:
    """The encoder of bridge_digits.py."""
    import bridge_digits

    data = bridge_digits.load(0)
    encoder, _ = bridge_digits.pretrain(data, 0)
    return Case("digits 1x8x8", encoder, data.upright[0][:192], 32)


def robot(cache: Path) -> Case:
    """The stage-1 encoder of examples/robot_policy on frames of its demonstrations."""
    sys.path.insert(0, str(ROOT / "examples" / "robot_policy"))
    from data import Demonstrations, Recipe, normalise
    from stage1 import load_encoder

    recorded = Demonstrations(Recipe(("button-press-v3",), 200), cache)
    recorded.setup("fit")
    assert recorded.frames is not None
    chosen = np.random.default_rng(0).choice(len(recorded.frames), 192, replace=False)
    return Case("robot 3x96x96", load_encoder().requires_grad_(False), normalise(recorded.frames.images[chosen]), 32)


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        return F.relu(self.body(x) + self.shortcut(x))


def large() -> Case:
    """A ResNet18 of 3x224x224, its weights random (its batch norms adjusted), on smooth random images."""
    torch.manual_seed(0)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    sizes = [(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    encoder = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *(Block(*size) for size in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    for norm in (m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    images = F.interpolate(torch.rand(48, 3, 14, 14), size=224, mode="bicubic").clamp(0, 1)
    with torch.no_grad():
        for part in images.split(8):
            encoder.train()(part)
    return Case("random ResNet18 3x224x224", encoder.eval().requires_grad_(False), images, 8)


class Correction(nn.Module):
    """A matrix over the channels and an offset for each, the identity at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.matrix, self.offset = nn.Parameter(torch.eye(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, images: Tensor) -> Tensor:
        """Map images to corrected ones."""
        return torch.einsum("ij,bjhw->bihw", self.matrix, images) + self.offset[:, None, None]


def outputs(value: Any) -> list[Tensor]:
    """The features, flat."""
    return [value] if isinstance(value, Tensor) else list(value)


def gradients(through: nn.Module, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Of the pixels, and of the correction."""
    correction = Correction(images.shape[1])
    x = correction(images)
    x.retain_grad()
    generator = torch.Generator().manual_seed(seed)
    loss = sum((torch.randn(y.shape, generator=generator) * y).sum() for y in outputs(through(x)))
    loss.backward()
    return x.grad.flatten(), torch.cat([parameter.grad.flatten() for parameter in correction.parameters()])


def measure(case: Case, artifact: npu.Artifact, m: int, structure: Structure | None, repeats: int) -> dict[str, Any]:
    """Mean cosines over ``repeats`` batches, and what the bridge itself says."""
    options = {"threads": 1}
    bridge = Bridge(m=m, structure=structure, max_batch=256)
    frozen = npu.NPUFrozenModule(artifact, gradient=bridge, runtime_options=options)
    seen: list[tuple[float, float]] = []
    for repeat in range(repeats):
        first = (repeat * case.batch) % (len(case.images) - case.batch + 1)
        images = case.images[first : first + case.batch]
        exact, estimate = gradients(case.encoder, images, repeat), gradients(frozen, images, repeat)
        seen.append(tuple(float(F.cosine_similarity(a, b, dim=0)) for a, b in zip(exact, estimate, strict=True)))
    figures = frozen.stats["gradient"]
    frozen.close()
    pixels, correction = np.array(seen).T
    return {
        "input": pixels.mean(),
        "correction": correction.mean(),
        "told": figures["cosine"],
        "eps": next(iter(figures["eps"].values()))["value"],
    }


def main() -> None:
    """Print a line per encoder, structure and number of directions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("outputs"), help="of examples/robot_policy")
    parser.add_argument("--repeats", type=int, default=6, help="batches per figure (default: %(default)s)")
    parser.add_argument("--m", type=int, nargs="*", default=[1, 4, 16], help="directions (default: %(default)s)")
    parser.add_argument("--only", choices=("digits", "robot", "large"), nargs="*", help="default: all three")
    args = parser.parse_args()
    torch.set_num_threads(1)
    makers = {"digits": digits, "robot": lambda: robot(args.cache), "large": large}
    for name in args.only or makers:
        case = makers[name]()
        size = case.images.shape[2]
        structures: Sequence[Structure | None] = (None, Blocks(size // 4), LowFrequency(4), Colour())
        print(f"\n{case.name}: {case.images[0].numel()} values, batches of {case.batch}, {args.repeats} batches")
        with tempfile.TemporaryDirectory() as folder:
            for precision in ("a8w8", "fp32"):
                batches = list(case.images.split(8))
                artifact = npu.compile_module(
                    case.encoder, (batches[0],), calibration=batches, output=Path(folder) / f"{precision}.npu",
                    precision=precision, min_sqnr_db=None,
                )  # fmt: skip
                for structure in structures if precision == "a8w8" else structures[::3]:
                    for m in args.m:
                        row = measure(case, artifact, m, structure, args.repeats)
                        print(
                            f"{precision}  m {m:3}  {structure or 'pixels'!s:24} input {row['input']:.3f}  "
                            f"correction {row['correction']:.3f}  told {row['told'] or math_nan():.3f}",
                            flush=True,
                        )
                        record = {"case": name, "precision": precision, "m": m, "structure": str(structure), **row}
                        print(json.dumps(record), file=sys.stderr)


def math_nan() -> float:
    """What the bridge says where it cannot know."""
    return float("nan")


if __name__ == "__main__":
    main()
