"""What one input or output of an artifact looks like: name, shape, dtype, layout, batch axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_npu.errors import ArtifactError, InputError

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
_REMEDY = "the manifest is damaged: copy the artifact again, or compile the module again"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an artifact.

    Attributes:
        name: its name in the graph.
        shape: sizes per axis; None on the batch axis of an artifact with a dynamic batch.
        dtype: dtype name as in torch, such as "float32".
        layout: axis letters, such as "NCHW" or "NLC"; "N?" with one "?" per axis whose meaning is not known.
        batch_axis: the axis that counts samples; None for a tensor that is the same for every sample.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"
    layout: str = ""
    batch_axis: int | None = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return DTYPES[self.dtype]

    @property
    def static_batch(self) -> int | None:
        """Samples per call where the artifact fixes them; None where it does not or where there is no batch axis."""
        return None if self.batch_axis is None else self.shape[self.batch_axis]

    def with_batch(self, batch: int) -> tuple[int, ...]:
        """The concrete shape for ``batch`` samples."""
        return tuple(batch if size is None else size for size in self.shape)

    def samples(self, tensor: torch.Tensor) -> int | None:
        """Samples that ``tensor`` holds, or None without a batch axis."""
        return None if self.batch_axis is None else int(tensor.shape[self.batch_axis])

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor of another rank, size or kind of dtype.

        Sizes along the batch axis are free: a caller splits or pads them to a fixed batch. Floating dtypes stand
        for each other (the caller converts), integers do not.

        Raises:
            InputError: with the expected and the actual shape or dtype.
        """
        fits = tensor.ndim == len(self.shape) and all(
            size is None or axis == self.batch_axis or tensor.shape[axis] == size
            for axis, size in enumerate(self.shape)
        )
        if not fits:
            raise InputError(
                f"Input '{self.name}' has the wrong shape.",
                expected=self.describe_shape(),
                got=f"{list(tensor.shape)}",
                remedy="feed what the module was compiled for, or compile it again for this shape",
            )
        expected = self.torch_dtype
        if tensor.dtype != expected and not (tensor.dtype.is_floating_point and expected.is_floating_point):
            raise InputError(
                f"Input '{self.name}' has the wrong dtype.",
                expected=self.dtype,
                got=str(tensor.dtype).removeprefix("torch."),
                remedy=f"convert it as the original module's caller does, for example x.to(torch.{self.dtype})",
            )

    def describe_shape(self) -> str:
        """The shape for people: ``[batch, 3, 224, 224] (NCHW)``."""
        sizes = ", ".join(
            "batch" if axis == self.batch_axis else "any" if size is None else str(size)
            for axis, size in enumerate(self.shape)
        )
        return f"[{sizes}]" + (f" ({self.layout})" if self.layout else "")

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON-ready primitives."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout,
            "batch_axis": self.batch_axis,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        """The inverse of :meth:`to_json`.

        Raises:
            ArtifactError: the batch axis is not an axis of the shape, or the dtype is unknown.
        """
        shape, axis = data["shape"], data["batch_axis"]
        if axis is not None and not 0 <= axis < len(shape):
            raise ArtifactError(
                f"Tensor '{data['name']}' has no axis {axis} to count samples.",
                expected=f"null, or an axis of its shape {shape}",
                got=axis,
                remedy=_REMEDY,
            )
        if data["dtype"] not in DTYPES:
            raise ArtifactError(
                f"Tensor '{data['name']}' has an unknown dtype.",
                expected=f"one of {list(DTYPES)}",
                got=data["dtype"],
                remedy=_REMEDY,
            )
        return cls(
            name=data["name"],
            shape=tuple(None if size is None else int(size) for size in shape),  # JSON's 3.0 is an integer
            dtype=data["dtype"],
            layout=data["layout"],
            batch_axis=None if axis is None else int(axis),
        )


def common_batch(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> int | None:
    """The number of samples that all batched tensors agree on; None when none of them has a batch axis.

    Raises:
        InputError: when they disagree.
    """
    sizes = {
        spec.name: int(tensor.shape[spec.batch_axis])
        for spec, tensor in zip(specs, tensors, strict=True)
        if spec.batch_axis is not None
    }
    if len(set(sizes.values())) > 1:
        raise InputError(
            "The inputs disagree about the number of samples.",
            expected="one batch size for all inputs",
            got=", ".join(f"{name}: {size}" for name, size in sizes.items()),
            remedy="feed inputs of one batch; for an input that all samples share, compile with batch_axis=[0, None]",
        )
    return next(iter(sizes.values()), None)
