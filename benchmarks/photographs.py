"""Natural images that come with scikit-image, scikit-learn and matplotlib; two disjoint sets of photographs."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import skimage.data
import sklearn.datasets
import torch
from matplotlib import image as matplotlib_image
from torch.nn import functional

CALIBRATION = (
    "astronaut", "chelsea", "rocket", "brick", "gravel", "coins", "moon", "immunohistochemistry", "clock",
    "flower.jpg", "grace_hopper.jpg",
)  # fmt: skip
TEST = ("coffee", "camera", "retina", "grass", "hubble_deep_field", "stereo_motorcycle", "china.jpg")


def photograph(name: str) -> torch.Tensor:
    """One photograph as uint8, shape (3, height, width)."""
    if name in ("flower.jpg", "china.jpg"):
        pixels = sklearn.datasets.load_sample_image(name)
    elif name == "grace_hopper.jpg":
        pixels = matplotlib_image.imread(Path(matplotlib.get_data_path()) / "sample_data" / name)
    else:
        pixels = getattr(skimage.data, name)()
        pixels = pixels[0] if isinstance(pixels, tuple) else pixels
    pixels = np.asarray(pixels)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    return torch.from_numpy(np.ascontiguousarray(pixels[..., :3].transpose(2, 0, 1)))


def crop(image: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """A random crop of 35 to 100 % of the largest one of this shape, resized; float32 in [0, 1], shape (3, *size)."""
    height, width = image.shape[-2:]
    scale = min(height / size[0], width / size[1]) * (0.35 + 0.65 * torch.rand((), generator=generator).item())
    high, wide = round(size[0] * scale), round(size[1] * scale)
    top = int(torch.randint(height - high + 1, (), generator=generator))
    left = int(torch.randint(width - wide + 1, (), generator=generator))
    part = image[None, :, top : top + high, left : left + wide].float() / 255
    return functional.interpolate(part, size=size, mode="bilinear", antialias=True, align_corners=False)[0].clamp(0, 1)


def crops(names: tuple[str, ...], size: tuple[int, int], count: int, seed: int) -> torch.Tensor:
    """``count`` random crops that take turns over the photographs; float32 in [0, 1], shape (count, 3, *size)."""
    generator = torch.Generator().manual_seed(seed)
    images = [photograph(name) for name in names]
    return torch.stack([crop(images[index % len(images)], size, generator) for index in range(count)])
