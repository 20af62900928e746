"""A classifier inside an INT8 artifact adapts to what its device sees: integer weights, forward calls, no gradients.

    python examples/forward_gradient/on_device_adaptation.py

A small network learns upright digits by backpropagation and is compiled to INT8. On the device the digits come turned.
From a few labelled images per class, the artifact's own integer weights are trained by fixed-point forward gradients
(in the manner of arXiv 2411.04036, with 8-bit weights and an 8-bit remainder instead of 16-bit weights), and saved as a
new artifact. Backpropagation in FP32 on the same images, which the device cannot do, is shown beside it.
Needs scikit-learn, whose digits it uses.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning_npu as npu
import numpy as np
import torch
from lightning_npu.forward_gradient import FixedPoint, ForwardGradient, GraphWeights
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Split = tuple[Tensor, Tensor]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--degrees", type=float, default=30.0, help="that digits are turned (default: %(default)s)")
    add("--shots", type=int, default=25, help="labelled images per class (default: %(default)s)")
    add("--steps", type=int, default=600, help="of 2 x 3 forward calls each (default: %(default)s)")
    add("--learning-rate", type=float, default=0.02, help="at first (default: %(default)s)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--output", type=Path, help="where the adapted artifact goes; default: nowhere")
    return parser.parse_args(arguments)


def digits(degrees: float, shots: int, seed: int) -> tuple[Split, Split, Split]:
    """Upright digits to learn from, turned ones to adapt with (``shots`` per class), and other turned ones to judge."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    upright, rest = order[:700], order[700:]
    turned = np.stack([rotate(image, degrees, reshape=False, order=1) for image in images]).clip(0, 1)
    few = np.concatenate([rest[labels[rest] == label][:shots] for label in range(10)])
    others = np.setdiff1d(rest, few)

    def split(source: np.ndarray, chosen: np.ndarray) -> Split:
        return torch.from_numpy(source[chosen])[:, None], torch.from_numpy(labels[chosen])

    return split(images, upright), split(turned, few), split(turned, others)


def network() -> nn.Sequential:
    """2,786 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )


def backpropagate(net: nn.Module, data: Split, steps: int, seed: int) -> None:
    """Adam, 64 images a step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(data[1]), (64,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(net(data[0][chosen]), data[1][chosen]).backward()
        optimizer.step()
        schedule.step()


def accuracy(model: Callable[[Tensor], Tensor], data: Split) -> float:
    """Percent."""
    with torch.no_grad():
        return 100 * float((model(data[0]).argmax(1) == data[1]).float().mean())


def adapt(weights: GraphWeights, data: Split, steps: int, learning_rate: float, seed: int) -> int:
    """Train the integers by forward calls alone; returns how many."""
    optimizer = ForwardGradient(
        weights.parameters(),
        learning_rate,
        eps=2e-2,
        m=3,
        estimator="normalized",
        fixed_point=FixedPoint(weight_bits=8, rounding="error_feedback"),
        seed=seed,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.step(lambda: cross_entropy(weights(data[0]), data[1]))
        schedule.step()
    return optimizer.calls


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Learn, compile, adapt, judge; the accuracies in percent."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore", message=r"\d+ parameters of Sequential require grad")  # frozen from here on
    upright, few, others = digits(args.degrees, args.shots, args.seed)
    net = network()
    backpropagate(net, upright, 1500, args.seed)
    oracle = copy.deepcopy(net)
    backpropagate(oracle, few, 500, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        batches = list(upright[0][:640].split(64))
        artifact = npu.compile_module(
            net.eval(), (batches[0],), calibration=batches, output=Path(folder) / "digits.npu"
        )
        weights = GraphWeights(artifact, list(GraphWeights.trainable(artifact)))
        found = {"before": accuracy(weights, others)}
        began = time.perf_counter()
        calls = adapt(weights, few, args.steps, args.learning_rate, args.seed)
        seconds = time.perf_counter() - began
        found["after"] = accuracy(weights, others)
        found["backpropagation"] = accuracy(oracle.eval(), others)
        adapted = weights.save(args.output or Path(folder) / "adapted.npu")
        found["saved"] = accuracy(npu.NPUFrozenModule(adapted), others)
        weights.close()
    print(
        f"digits turned by {args.degrees:g} degrees, {args.shots} labelled images per class, {len(others[1])} to judge"
    )
    print(f"INT8 artifact as compiled                       {found['before']:5.1f} %")
    print(f"... adapted, {calls} forward calls in {seconds:.0f} s        {found['after']:5.1f} %")
    print(f"... saved as an artifact and opened again       {found['saved']:5.1f} %")
    print(f"FP32 adapted by backpropagation, 500 steps      {found['backpropagation']:5.1f} %")
    return found


if __name__ == "__main__":
    main()
