"""What a board computes with a file of the fake compiler: the ONNX model inside, on one sample in H, W, C."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

ROOT = Path(__file__).parent


def read_mxq(path: Path) -> dict[str, Any]:
    """What the fake compiler was told and wrote."""
    return json.loads(path.read_bytes()[8:])


def put_on(board: Any, mxq: Path, noise: float = 0.0) -> None:
    """Let a simulated board compute what is in ``mxq``.

    Args:
        board: the simulated board of ``fakes.qbruntime``.
        mxq: a file of the fake compiler.
        noise: relative standard deviation of an error added to every output.
    """
    content = read_mxq(mxq)
    session = onnxruntime.InferenceSession(base64.b64decode(content["onnx"]), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    shapes = [tuple(value.shape) for value in session.get_inputs()]
    random = np.random.default_rng(0)

    def compute(arrays: list[np.ndarray]) -> list[np.ndarray]:
        feeds = {}
        for name, shape, array in zip(names, shapes, arrays, strict=True):
            hwc = array.astype(np.float32)
            if name in content["uint8"]:
                assert array.dtype == np.uint8
                hwc /= 255
                for step in content["pipeline"] or []:
                    hwc = (hwc - np.array(step["mean"])) / np.array(step["std"])
            chw = hwc.transpose(2, 0, 1) if len(shape) == 4 else hwc
            feeds[name] = np.ascontiguousarray(chw.reshape(shape), dtype=np.float32)
        results = []
        for array, hwc in zip(session.run(None, feeds), content["outputs"], strict=True):
            array = array + noise * array.std() * random.standard_normal(array.shape).astype(np.float32)
            array = array[0].transpose(1, 2, 0) if array.ndim == 4 else array
            results.append(np.ascontiguousarray(array.reshape(hwc), dtype=np.float32))
        return results

    board.inputs = [tuple(shape) for shape in content["inputs"]]
    board.outputs = [tuple(shape) for shape in content["outputs"]]
    board.input_type = "Uint8" if content["uint8"] else "Float32"
    board.modes = [content["scheme"].capitalize()] if content["scheme"] != "all" else ["Single", "Global4", "Global8"]
    board.compute = compute
