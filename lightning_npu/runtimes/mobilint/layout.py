"""Between an artifact's tensors and the device's: images as (height, width, channels), tokens as (1, tokens, dim)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_npu.errors import ArtifactError, DeviceError
from lightning_npu.runtimes.mobilint.scales import Quantization, quantization
from lightning_npu.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact

Hwc = tuple[int, int, int]
_AGAIN = "compile the module again"
# what float32 holds exactly
_EXACT = (torch.float32, torch.float16, torch.uint8, torch.int8, torch.int16, torch.bool)


@dataclass(frozen=True)
class Port:
    """One input or output: as the artifact has it, and as the device has it.

    Attributes:
        spec: the artifact's side, any batch.
        hwc: the device's side, one image.
        permuted: whether the artifact's side is channels, height, width; else both lie alike in memory.
        dtype: of the device's side.
        quantization: how device integers stand for numbers; None: the device takes or gives numbers.
    """

    spec: TensorSpec
    hwc: Hwc
    permuted: bool
    dtype: torch.dtype
    quantization: Quantization | None = None

    def images(self, tensor: Tensor, count: int) -> list[Any]:
        """One contiguous NumPy array (H, W, C) per image; ``count`` times the same where there is no batch axis."""
        axis, tensor = self.spec.batch_axis, tensor.detach()
        batch = tensor.unsqueeze(0) if axis is None else tensor.movedim(axis, 0)
        batch = batch.to(self.dtype if self.quantization is None else torch.float32)
        if self.permuted:
            batch = batch.permute(0, 2, 3, 1)
        batch = batch.reshape(batch.shape[0], *self.hwc)
        if self.quantization is not None:
            batch = self.quantization.quantize(batch)
        arrays = batch.contiguous().numpy()
        return [arrays[0 if axis is None else index] for index in range(count)]

    def empty(self, count: int) -> Tensor:
        """Memory for ``count`` images, as the artifact has it."""
        shape = [int(size or 0) for size in self.spec.shape]
        if self.spec.batch_axis is not None:
            shape[self.spec.batch_axis] = count
        return torch.empty(shape, dtype=self.spec.torch_dtype, device="cpu")

    def place(self, array: Any, out: Tensor, index: int) -> None:
        """Copy one image's answer to its place in ``out``.

        Raises:
            DeviceError: it has another shape or dtype than the artifact says.
        """
        tensor = torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array.copy())
        if tuple(tensor.shape) not in (self.hwc, (1, *self.hwc)) or tensor.dtype != self.dtype:
            raise DeviceError(
                f"The device answered with another shape or dtype in output '{self.spec.name}' than the artifact says.",
                expected=f"{list(self.hwc)} {self.dtype}",
                got=f"{list(tensor.shape)} {tensor.dtype}",
                remedy="check driver and qbruntime with `lightning-npu doctor`; " + _AGAIN,
            )
        image = tensor.reshape(self.hwc)
        if self.quantization is not None:
            image = self.quantization.dequantize(image)
        if self.permuted:
            image = image.permute(2, 0, 1)
        axis = self.spec.batch_axis
        target = out if axis is None else out.select(axis, index)
        target.copy_(image.reshape(target.shape))


def open_ports(
    artifact: Artifact, section: Mapping[str, Any], model: Any, *, int8: bool
) -> tuple[list[Port], list[Port]]:
    """How the artifact's inputs and outputs cross to the device and back.

    Args:
        artifact: a loaded artifact.
        section: its manifest's section "mobilint".
        model: the vendor's model.
        int8: whether INT8 crosses the bus, converted here.

    Raises:
        ArtifactError: the MXQ is not what the manifest says, or its outputs are not INT8 when ``int8`` needs it.
    """
    shapes = model.get_model_input_shape(), model.get_model_output_shape()
    for title, specs, entries, found in (
        ("inputs", artifact.inputs, section["inputs"], shapes[0]),
        ("outputs", artifact.outputs, section["outputs"], shapes[1]),
    ):
        if not len(specs) == len(entries) == len(found):
            raise ArtifactError(
                f"The MXQ has another number of {title} than the module.",
                expected=f"{len(specs)}: {[spec.name for spec in specs]}",
                got=f"{len(found)} in the MXQ, {len(entries)} in the manifest",
                remedy="a graph that the compiler had to split has one input and output per part: compile the module "
                "again, with attention in plain operators",
            )
    scales: tuple[list[Any], list[Any]] = ([None] * len(artifact.inputs), [None] * len(artifact.outputs))
    if int8:
        kind = model.get_model_output_data_type().name
        if kind != "Int8":
            raise ArtifactError(
                "int8=True needs a network whose outputs are INT8 on the device.", expected="Int8", got=kind,
                remedy="leave int8 out: outputs of 16-bit layers, as in most Transformers, come as float32",
            )  # fmt: skip
        scales = (
            [
                quantization(scale, shape[-1], spec.name)
                for scale, shape, spec in zip(model.get_input_scale(), shapes[0], artifact.inputs, strict=True)
            ],
            [
                quantization(scale, shape[-1], spec.name)
                for scale, shape, spec in zip(model.get_output_scale(), shapes[1], artifact.outputs, strict=True)
            ],
        )
    dtype = model.get_model_input_data_type().name
    inputs = [
        input_port(*parts[:3], dtype, parts[3])
        for parts in zip(artifact.inputs, section["inputs"], shapes[0], scales[0], strict=True)
    ]
    outputs = [
        output_port(*parts) for parts in zip(artifact.outputs, section["outputs"], shapes[1], scales[1], strict=True)
    ]
    return inputs, outputs


def input_port(
    spec: TensorSpec, entry: Mapping[str, Any], shape: Sequence[int], kind: str, scales: Quantization | None
) -> Port:
    """How the artifact's input ``spec`` reaches the device.

    Args:
        spec: the artifact's side.
        entry: the manifest's ``mobilint.inputs`` entry.
        shape: height, width, channels, as the opened MXQ says.
        kind: the name of the MXQ's input data type, such as "Uint8".
        scales: given where INT8 crosses the bus.

    Raises:
        ArtifactError: they do not fit each other.
    """
    hwc = _checked(spec.name, entry, shape)
    expected = {"Float32": "float32", "Uint8": "uint8"}.get(kind)
    if expected != entry["dtype"]:
        raise ArtifactError(
            f"The MXQ takes input '{spec.name}' in another dtype than the artifact says.",
            expected=entry["dtype"], got=kind, remedy=_AGAIN,
        )  # fmt: skip
    if expected == "uint8" and spec.torch_dtype != torch.uint8:
        raise ArtifactError(
            f"The MXQ takes input '{spec.name}' as uint8, but the module takes {spec.dtype}.",
            expected="a module whose input is uint8, with the normalisation inside",
            got=spec.dtype,
            remedy="compile a module that takes raw frames, or compile without fused preprocessing",
        )
    if expected == "uint8" and scales is not None:
        raise ArtifactError(
            f"Input '{spec.name}' is uint8: it already crosses the bus in one byte per value.",
            got="int8=True",
            remedy="leave int8 out",
        )
    if spec.torch_dtype not in _EXACT:
        raise ArtifactError(
            f"Input '{spec.name}' is {spec.dtype}, which float32 does not hold exactly.",
            expected=f"one of {[str(dtype).removeprefix('torch.') for dtype in _EXACT]}",
            got=spec.dtype,
            remedy="convert it in front of the frozen module",
        )
    dtype = torch.int8 if scales is not None else torch.uint8 if expected == "uint8" else torch.float32
    return Port(spec, hwc, _permuted(spec, hwc), dtype, scales)


def output_port(spec: TensorSpec, entry: Mapping[str, Any], shape: Sequence[int], scales: Quantization | None) -> Port:
    """How the device's output becomes the artifact's output ``spec``; see :func:`input_port`."""
    hwc = _checked(spec.name, entry, shape)
    dtype = torch.float32 if scales is None else torch.int8
    return Port(spec, hwc, _permuted(spec, hwc), dtype, scales)


def _checked(name: str, entry: Mapping[str, Any], shape: Sequence[int]) -> Hwc:
    if len(shape) == 4 and shape[0] == 1:
        shape = shape[1:]
    found = tuple(int(size) for size in shape)
    if found != tuple(entry["shape"]):
        variable = any(size < 0 for size in found)
        raise ArtifactError(
            f"The MXQ has another shape at '{name}' than the artifact says.",
            expected=f"{list(entry['shape'])} (height, width, channels)",
            got=f"{list(found)}" + (", whose negative sizes are variable" if variable else ""),
            remedy=_AGAIN + (" with static shapes" if variable else ""),
        )
    return found  # type: ignore[return-value]  # the manifest's shape has three sizes, and it is equal


def _permuted(spec: TensorSpec, hwc: Hwc) -> bool:
    """Whether one sample is (C, H, W); False where it lies in memory as (H, W, C) does.

    Three axes are channels first, as everything in ONNX is, unless the layout says otherwise. Fewer, and sizes of 1,
    are only another way to count: tokens (L, D) are (1, L, D), a vector (D,) is (1, 1, D).

    Raises:
        ArtifactError: neither.
    """
    sizes = tuple(int(size or 0) for axis, size in enumerate(spec.shape) if axis != spec.batch_axis)
    letters = spec.layout.replace("N", "")
    if len(sizes) == 3 and letters != "HWC" and (sizes[1], sizes[2], sizes[0]) == hwc:
        return True
    if [size for size in sizes if size != 1] == [size for size in hwc if size != 1]:
        return False
    raise ArtifactError(
        f"'{spec.name}' cannot be laid out as the device has it.",
        expected="height, width, channels of the same tensor",
        got=f"{spec.describe_shape()} here, {list(hwc)} there",
        remedy=_AGAIN,
    )
