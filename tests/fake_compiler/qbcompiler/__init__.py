"""A fake of Mobilint's qbcompiler: names and signatures of its public manual 1.3, and none of its arithmetic.

It reads the calibration data as strictly as the manual says, and writes a file that begins as an MXQ does, with the
ONNX model inside, so that ``board.py`` can compute what the real one would in integers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .configs import (
    BitConfig,
    CalibrationConfig,
    PreprocessingConfig,
    QBCompilerError,
    Uint8InputConfig,
)

__all__ = ["BitConfig", "CalibrationConfig", "PreprocessingConfig", "QBCompilerError", "Uint8InputConfig"]
__version__ = os.environ.get("FAKE_QBCOMPILER_VERSION", "1.3.0")
DEVICES = ("aries-rb", "regulus-ra", "regulus-rb", "regulus-rb-usb")
KINDS = {"Mul": "MultiplyConstant", "Div": "DivConstant", "Add": "Adding", "Conv": "Convolution"}
SCHEMES = ("single", "multi", "global", "global4", "global8", "all")


def mxq_compile(
    model: Any,
    target_device: str | None = None,
    calib_data_path: Any = None,
    save_path: str = "./tmp.mxq",
    backend: str = "onnx",
    feed_dict: Any = None,
    dynamic_axes: Any = None,
    in_dformats: Any = None,
    yolo_decode_include: bool = False,
    exclude_first_subgraph: bool = False,
    device: str = "gpu",
    inference_scheme: str = "single",
    use_random_calib: bool = False,
    cpu_offload: bool = False,
    layer_bias_correction: bool = False,
    buffer_mode: int = 1,
    input_shape_dict: Any = None,
    force_npu_input_reposition: bool = False,
    force_npu_output_reposition: bool = False,
    image_channels: int = 0,
    split_blocks: Any = None,
    split_parts: int = 0,
    config_preset: str | None = None,
    compile_config: Any = None,
    config_save_path: str | None = None,
    model_part: str | None = None,
    model_part_options: Any = None,
    calibration_config: CalibrationConfig | None = None,
    bit_config: BitConfig | None = None,
    llm_config: Any = None,
    hessian_quant_config: Any = None,
    layer_bias_correction_config: Any = None,
    mod_config: Any = None,
    equivalent_transformation_config: Any = None,
    search_weight_scale_config: Any = None,
    uint8_input_config: Uint8InputConfig | None = None,
    preprocessing_config: PreprocessingConfig | None = None,
    save_sample_config: Any = None,
    **kwargs: Any,
) -> None:
    print("qbcompiler: parsing, calibrating, quantizing", flush=True)
    if os.environ.get("FAKE_QBCOMPILER_FAILS"):
        raise QBCompilerError(os.environ["FAKE_QBCOMPILER_FAILS"])
    known = ("aries2", *DEVICES) if __version__.lstrip("v").startswith("1.1") else DEVICES
    if target_device not in known or backend != "onnx" or device not in ("gpu", "cpu"):
        raise QBCompilerError(f"bad arguments: {target_device} {backend} {device}")
    if inference_scheme not in SCHEMES:
        raise QBCompilerError(f"no such inference scheme: {inference_scheme}")
    if config_save_path is not None:
        Path(config_save_path).write_text(json.dumps({"inferenceScheme": inference_scheme}))
    graph = onnx.load(model).graph
    uint8 = _uint8_inputs(graph, uint8_input_config)
    samples = _calibration(graph, calib_data_path, uint8)
    content = {
        "onnx": base64.b64encode(Path(model).read_bytes()).decode(),
        "onnx_sha256": hashlib.sha256(Path(model).read_bytes()).hexdigest(),
        "inputs": [_hwc(value) for value in graph.input],
        "outputs": [_hwc(value) for value in graph.output],
        "uint8": uint8,
        "pipeline": None if preprocessing_config is None else preprocessing_config.pipeline,
        "scheme": inference_scheme,
        "target_device": target_device,
        "device": device,
        "image_channels": image_channels,
        "bits": None if bit_config is None else bit_config.describe(),
        "calibration": None if calibration_config is None else vars(calibration_config),
        "samples": samples,
        "dropped": sorted(kwargs),
    }
    Path(save_path).write_bytes(b".MXQ" + b"\0\0\7\0" + json.dumps(content).encode())


def mblt_compile(
    model: Any,
    mblt_save_path: str,
    target_device: str,
    backend: str = "onnx",
    feed_dict: Any = None,
    device: str = "gpu",
    cpu_offload: bool = False,
    **kwargs: Any,
) -> None:
    """The parser names layers in its own way."""
    layers = []
    for number, node in enumerate(onnx.load(model).graph.node):
        kind = {"Mul": "MultiplyConstant", "Div": "DivConstant", "Add": "Adding", "Conv": "Convolution"}.get(
            node.op_type, node.op_type
        )
        layers.append([kind, f"{kind.lower()}_{number}", list(node.input), list(node.output)])
    Path(mblt_save_path).write_text(json.dumps({"subgraphs": [layers]}))


def _uint8_inputs(graph: Any, config: Uint8InputConfig | None) -> list[str]:
    names = [value.name for value in graph.input]
    if config is None or not config.apply:
        return []
    if set(config.inputs) - set(names):
        raise QBCompilerError(f"no such inputs: {config.inputs}")
    return list(config.inputs) or names


def _hwc(value: Any) -> list[int]:
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if len(sizes) == 4:
        return [sizes[2], sizes[3], sizes[1]]
    return [1, *sizes[-2:]] if len(sizes) == 3 else [1, 1, sizes[-1]]


def _calibration(graph: Any, path: Any, uint8: list[str]) -> int:
    """Read all of it; what the real one would misread is refused."""
    names = [value.name for value in graph.input]
    shapes = [tuple(_hwc(value)) for value in graph.input]
    if len(names) == 1:
        if not str(path).endswith(".txt"):
            raise QBCompilerError("expected a list of files")
        samples = [[line] for line in Path(path).read_text().splitlines()]
    else:
        listed = json.loads(Path(path).read_text())
        if listed["info"] != {"input names": names, "input shapes": [list(shape) for shape in shapes]}:
            raise QBCompilerError(f"calibration is for other inputs: {listed['info']}")
        samples = listed["calib paths"]
    for sample in samples:
        for name, shape, file in zip(names, shapes, sample, strict=True):
            array = np.load(file, allow_pickle=False)
            if array.shape != shape:
                raise QBCompilerError(f"{file}: {array.shape} is not {shape}")
            if array.dtype != (np.uint8 if name in uint8 else np.float32):
                raise QBCompilerError(f"{file}: {array.dtype}")
    return len(samples)
