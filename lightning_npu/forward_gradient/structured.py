"""Directions in a subspace of images: fewer dimensions to search, where the gradient that is wanted lies in them.

A probe of independent pixels answers one question about as many unknowns as there are pixels. What lies before the
encoder often cannot make use of most of them: a colour correction or an exposure acts alike on all pixels, a
vignette or a smooth prompt varies slowly. The estimate is then the gradient's projection on the subspace, unbiased; the
rest of the gradient is not seen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.tensor_spec import TensorSpec

Draw = Callable[[Sequence[int]], Tensor]


class Structure(ABC):
    """Abstract. A subspace of images (batch, channels, height, width), in which directions are drawn."""

    @abstractmethod
    def share(self, shape: Sequence[int]) -> float:
        """Dimensions of the subspace over dimensions of an image of ``shape``."""

    @abstractmethod
    def direction(self, images: Tensor, draw: Draw) -> Tensor:
        """One direction per image, of its shape, with a mean square of 1.

        Args:
            images: float32, (batch, channels, height, width), about which the direction is taken.
            draw: gives independent numbers of zero mean and unit variance, by shape.
        """

    def check(self, spec: TensorSpec) -> None:
        """Refuse inputs that are no images of a size that fits.

        Raises:
            InputError: with what to write instead.
        """
        if len(spec.shape) != 4 or spec.batch_axis != 0:
            raise InputError(
                f"{self} is for images, and input '{spec.name}' is none.",
                expected="[batch, channels, height, width]",
                got=spec.describe_shape(),
                remedy="name the input that it is for: structure={'images': ...}",
            )


@dataclass(frozen=True)
class Blocks(Structure):
    """One number per channel and block of ``size`` x ``size`` pixels.

    Args:
        size: in pixels; divides height and width.

    Raises:
        InputError: a size below 1.
    """

    size: int = 8

    def __post_init__(self) -> None:
        _require_positive("Blocks.size", self.size)

    def share(self, shape: Sequence[int]) -> float:
        """One of ``size`` x ``size``."""
        return 1.0 / self.size**2

    def direction(self, images: Tensor, draw: Draw) -> Tensor:
        """Each block moves by one number."""
        batch, channels, height, width = images.shape
        coarse = draw((batch, channels, height // self.size, width // self.size))
        return coarse.repeat_interleave(self.size, 2).repeat_interleave(self.size, 3)

    def check(self, spec: TensorSpec) -> None:
        """Refuse sizes that blocks do not divide."""
        super().check(spec)
        if any(size is not None and size % self.size for size in spec.shape[2:]):
            raise InputError(
                f"Blocks of {self.size} pixels do not divide input '{spec.name}'.",
                expected="a size that divides height and width",
                got=spec.describe_shape(),
                remedy=f"take Blocks({math.gcd(*(int(size or 0) for size in spec.shape[2:]))})",
            )


@dataclass(frozen=True)
class LowFrequency(Structure):
    """The ``cutoff`` x ``cutoff`` lowest frequencies of a cosine transform, in each channel.

    Args:
        cutoff: frequencies along each axis, the constant among them.

    Raises:
        InputError: a cutoff below 1.
    """

    cutoff: int = 8

    def __post_init__(self) -> None:
        _require_positive("LowFrequency.cutoff", self.cutoff)

    def share(self, shape: Sequence[int]) -> float:
        """Frequencies over pixels."""
        return self.cutoff**2 / (shape[2] * shape[3])

    def direction(self, images: Tensor, draw: Draw) -> Tensor:
        """A sum of slow waves."""
        batch, channels, height, width = images.shape
        waves = draw((batch, channels, self.cutoff, self.cutoff))
        return (
            _cosines(height, self.cutoff).T
            @ waves
            @ _cosines(width, self.cutoff)
            * math.sqrt(self.share(images.shape) ** -1)
        )

    def check(self, spec: TensorSpec) -> None:
        """Refuse images of fewer pixels than frequencies."""
        super().check(spec)
        if any(size is not None and size < self.cutoff for size in spec.shape[2:]):
            raise InputError(
                f"Input '{spec.name}' has fewer pixels than {self} has frequencies.",
                expected=f"height and width of {self.cutoff} or more",
                got=spec.describe_shape(),
                remedy="take a lower cutoff",
            )


@dataclass(frozen=True)
class Colour(Structure):
    """What an affine change of colours does to an image: each channel moves by a mix of all channels and a constant.

    Whatever correction of colours lies before the encoder, its matrix, gains and offset move the image within these
    directions, so their gradient is estimated without bias: with 12 unknowns per image of three channels instead of
    one per pixel and channel.
    """

    def share(self, shape: Sequence[int]) -> float:
        """A channel has its constant and as many mixed channels as there are, of all pixels."""
        return (shape[1] + 1) / (shape[2] * shape[3])

    def direction(self, images: Tensor, draw: Draw) -> Tensor:
        """Random mixes of the image's own channels, made orthonormal first."""
        batch, channels, height, width = images.shape
        pixels = images.reshape(batch, channels, -1).transpose(1, 2)
        mixed = torch.cat([torch.ones_like(pixels[..., :1]), pixels], dim=2)
        basis = torch.linalg.qr(mixed.double())[0].to(images.dtype)  # (batch, pixels, channels + 1)
        mix = draw((batch, channels + 1, channels)) * math.sqrt(height * width / (channels + 1))
        direction: Tensor = (basis @ mix).transpose(1, 2).reshape(images.shape)
        return direction

    def check(self, spec: TensorSpec) -> None:
        """Refuse images of fewer pixels than colours."""
        super().check(spec)
        channels, height, width = (int(size or 0) for size in spec.shape[1:])
        if height and width and height * width <= channels:
            raise InputError(
                f"Input '{spec.name}' has no more pixels than channels.",
                expected="an image of colours",
                got=spec.describe_shape(),
                remedy="leave out structure",
            )


def _cosines(size: int, count: int) -> Tensor:
    """The first ``count`` rows of the orthonormal cosine transform of ``size`` points."""
    points = (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / size)
    rows = torch.cos(torch.arange(count, dtype=torch.float64, device="cpu")[:, None] * points)
    rows *= math.sqrt(2 / size)
    rows[0] *= math.sqrt(0.5)
    return rows.float()


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is wrong.", expected="an integer from 1 on", got=repr(value))
