"""The device's INT8 values as numbers and back, by the scales that an MXQ carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_npu.errors import ArtifactError

_REMEDY = "leave int8 out: qbruntime then converts by itself"


@dataclass(frozen=True)
class Quantization:
    """``number = (integer - zero_point) * scale``, one for all or one per channel (the last axis)."""

    scale: Tensor
    zero_point: Tensor

    def dequantize(self, values: Tensor) -> Tensor:
        """INT8 values (..., channels) as float32."""
        return (values.to(torch.float32) - self.zero_point) * self.scale

    def quantize(self, numbers: Tensor) -> Tensor:
        """Numbers (..., channels) as INT8, rounded half to even, cut off at -128 and 127."""
        return (numbers / self.scale + self.zero_point).round().clamp(-128, 127).to(torch.int8)


def quantization(scale: Any, channels: int, name: str) -> Quantization:
    """A ``qbruntime.Scale``, checked: its own indexing has no bounds check and answers with garbage.

    Args:
        scale: what ``get_input_scale`` or ``get_output_scale`` gave for one tensor.
        channels: channels of that tensor.
        name: of that tensor, for errors.

    Raises:
        ArtifactError: a scale that is not positive and finite, as many as there are not channels, or a zero point
            that INT8 does not reach.
    """
    uniform, asymmetric = bool(scale.is_uniform), bool(getattr(scale, "is_asymmetric", False))  # 1.3 and later
    scales: Sequence[float] = [scale.scale] if uniform else list(scale.scale_list)
    if not asymmetric:
        zeros: Sequence[int] = [0] * len(scales)
    else:
        zeros = [scale.zero_point] if uniform else list(scale.zero_points)
    count = 1 if uniform else channels
    if len(scales) != count or len(zeros) != count:
        raise ArtifactError(
            f"The MXQ has another number of scales for '{name}' than the tensor has channels.",
            expected=f"{count} scales and zero points",
            got=f"{len(scales)} and {len(zeros)}",
            remedy=_REMEDY,
        )
    bad = [value for value in scales if not (math.isfinite(value) and value > 0)]
    if bad:
        raise ArtifactError(
            f"The MXQ has scales for '{name}' that are none.", expected="finite numbers above 0", got=bad[:5],
            remedy=_REMEDY,
        )  # fmt: skip
    out = [value for value in zeros if not -128 <= value <= 127]
    if out:
        raise ArtifactError(
            f"The MXQ has zero points for '{name}' that INT8 does not reach.", expected="-128 to 127", got=out[:5],
            remedy=_REMEDY,
        )  # fmt: skip
    return Quantization(torch.tensor(scales, dtype=torch.float32), torch.tensor(zeros, dtype=torch.float32))
