"""A camera whose colours and exposure have drifted, and the correction that can be put before the encoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Drift:
    """What became of the camera: colours mix, the exposure is another, and so is the curve; then 8 bits again.

    Attributes:
        matrix: rows of the colours that are seen, from red, green and blue.
        gain: exposure.
        gamma: exponent of the curve, on [0, 1].
    """

    matrix: tuple[tuple[float, float, float], ...] = ((1.25, 0.05, 0.0), (0.05, 0.85, 0.0), (0.0, 0.1, 0.5))
    gain: float = 0.9
    gamma: float = 1.1

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Map images (..., 3, height, width) to what the drifted camera would have taken; what exceeds 255 is lost."""
        mixed = np.einsum("ij,...jhw->...ihw", np.asarray(self.matrix, np.float32), images.astype(np.float32) / 255)
        return (255 * np.clip(self.gain * mixed, 0, 1) ** self.gamma).round().astype(np.uint8)


class Correction(nn.Module):
    """A 3x3 colour matrix and an offset for each colour, 12 parameters; the identity at first."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(3))
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        """Map normalised images (batch, 3, height, width) to corrected ones."""
        return torch.einsum("ij,bjhw->bihw", self.matrix, images) + self.offset[:, None, None]
