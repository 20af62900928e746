"""Tasks for benchmarks/forward_gradient.py: small networks on scikit-learn's digits that meet shifted data.

Every task has four disjoint splits: pre-training, adaptation, validation (learning rates and checkpoints are chosen on
it) and test. Pre-training is by backpropagation in FP32; what is compared is the adaptation that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import Tensor, nn

Split = tuple[Tensor, Tensor]


class Int8Activation(nn.Module):
    """Rounds to a static grid of 8 bits, as an INT8 engine hands activations on; off until it is calibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The nearest values of the grid, saturated."""
        return torch.round(x / self.step).clamp_(-127, 127).mul_(self.step) if self.step else x


def calibrate(net: nn.Module, x: Tensor) -> None:
    """Give every :class:`Int8Activation` of ``net`` a range that holds what it sees on ``x``."""
    largest: dict[nn.Module, float] = {}
    gates = [module for module in net.modules() if isinstance(module, Int8Activation)]
    handles = [
        gate.register_forward_pre_hook(lambda gate, args: largest.__setitem__(gate, float(args[0].abs().max())))
        for gate in gates
    ]
    with torch.no_grad():
        net(x)
    for gate, handle in zip(gates, handles, strict=True):
        handle.remove()
        gate.step = largest[gate] / 127


def conv_net() -> nn.Sequential:
    """2,786 parameters: two convolutions and a classifier."""
    return nn.Sequential(
        Int8Activation(),
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        Int8Activation(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        Int8Activation(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )


class Residual(nn.Module):
    """A residual block of two 3 x 3 convolutions, each followed by GroupNorm."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.GroupNorm(4, outside),
            nn.ReLU(),
            Int8Activation(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.GroupNorm(4, outside),
        )
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.gate = Int8Activation()

    def forward(self, x: Tensor) -> Tensor:
        """Add, rectify, round."""
        return self.gate(torch.relu(self.main(x) + self.skip(x)))


def res_net() -> nn.Sequential:
    """A ResNet of three blocks on 8 x 8 images."""
    return nn.Sequential(
        Int8Activation(),
        nn.Conv2d(1, 16, 3, 1, 1),
        nn.ReLU(),
        Int8Activation(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 32, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Int8Activation(),
        nn.Linear(32, 10),
    )


@dataclass
class Task:
    """A pre-trained network and the data that it is adapted to.

    Attributes:
        net: FP32, activations not rounded.
        trained: names of the parameters that are adapted.
        calibration: data from before the shift, for activation ranges.
        adapt: split to train on.
        validate: split to choose on.
        test: split to report.
    """

    net: nn.Sequential
    trained: list[str]
    calibration: Tensor
    adapt: Split
    validate: Split
    test: Split


def images() -> tuple[np.ndarray, np.ndarray]:
    """1,797 digits of 8 x 8 pixels in [0, 1], and their labels."""
    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 8, 8) / 16.0).astype(np.float32), y


def rotated(degrees: float) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Turns every image by ``degrees``."""
    return lambda x, generator: np.stack([rotate(image, degrees, reshape=False, order=1) for image in x])


def noisy(sigma: float) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Adds Gaussian noise."""
    return lambda x, generator: np.clip(x + generator.normal(0, sigma, x.shape), 0, 1).astype(np.float32)


def dimmed(gain: float, offset: float) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Less contrast on a brighter ground."""
    return lambda x, generator: x * gain + offset


def shifted(shift: Callable[[np.ndarray, np.random.Generator], np.ndarray], seed: int, *, classifier: bool) -> Task:
    """The convolutional net, trained on 700 upright digits, adapted to 500 shifted ones.

    Args:
        shift: what happens to the images.
        seed: of splits and initial weights.
        classifier: adapt the last layer only; else all layers.
    """
    x, y = images()
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(y))
    moved = shift(x, generator)
    first, *rest = np.split(order, [700, 1200, 1400])
    net = pretrain(conv_net, _split(x, y, first), seed)
    names = [name for name, _ in net.named_parameters()]
    splits = [_split(moved, y, part) for part in rest]
    return Task(net, names[-2:] if classifier else names, _split(x, y, first)[0], *splits)


def few_shot(seed: int, *, ways: int = 5, shots: int = 5) -> Task:
    """A small ResNet, trained on digits 0 to 4, that learns 5 to 9 from ``shots`` images each.

    The new classifier starts at the classes' mean features (prototypes), by distance, less what all classes share: that
    changes no probability, and without it biases near 100 would get an 8-bit grid with steps of 0.8. The last block and
    the classifier are adapted. 20 images per class validate.
    """
    x, y = images()
    generator = np.random.default_rng(seed)
    old = np.flatnonzero(y < ways)
    net = pretrain(res_net, _split(x, y, old), seed)
    parts: list[list[int]] = [[], [], []]
    for label in range(ways, 2 * ways):
        found = generator.permutation(np.flatnonzero(y == label))
        for part, chosen in zip(parts, np.split(found, [shots, shots + 20]), strict=True):
            part += chosen.tolist()
    splits = [_split(x, y - ways, np.array(part)) for part in parts]
    with torch.no_grad():
        features = net[:-1](splits[0][0])
        prototypes = torch.stack([features[splits[0][1] == way].mean(0) for way in range(ways)])
        head = nn.Linear(32, ways)
        head.weight.copy_(prototypes - prototypes.mean(0))
        bias = -prototypes.square().sum(1) / 2
        head.bias.copy_(bias - bias.mean())
    net[-1] = head
    names = [name for name, _ in net.named_parameters() if name.startswith(("6.", "10."))]
    return Task(net, names, _split(x, y, old)[0], *splits)


def pretrain(make: Callable[[], nn.Sequential], split: Split, seed: int) -> nn.Sequential:
    """Train a fresh network with Adam: 1,500 steps of 64 samples."""
    torch.manual_seed(seed)
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        index = torch.randint(len(split[1]), (64,))
        loss = nn.functional.cross_entropy(net(split[0][index]), split[1][index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net


def accuracy(net: nn.Module, split: Split) -> float:
    """Percent of ``split`` that ``net`` classifies correctly."""
    with torch.no_grad():
        return 100 * float((net(split[0]).argmax(1) == split[1]).float().mean())


def _split(x: np.ndarray, y: np.ndarray, index: np.ndarray) -> Split:
    return torch.from_numpy(x[index]).float().unsqueeze(1), torch.from_numpy(y[index]).long()


TASKS: dict[str, Callable[[int], Task]] = {
    "rot15 FT": lambda seed: shifted(rotated(15), seed, classifier=False),
    "rot30 FT": lambda seed: shifted(rotated(30), seed, classifier=False),
    "rot45 FT": lambda seed: shifted(rotated(45), seed, classifier=False),
    "noise FT": lambda seed: shifted(noisy(0.5), seed, classifier=False),
    "dim FT": lambda seed: shifted(dimmed(0.4, 0.4), seed, classifier=False),
    "rot15 LP": lambda seed: shifted(rotated(15), seed, classifier=True),
    "rot30 LP": lambda seed: shifted(rotated(30), seed, classifier=True),
    "few-shot ResNet": few_shot,
}
