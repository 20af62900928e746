"""Calibration data as the vendor's compiler reads it: one .npy file per input and sample, height, width, channels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_npu.compile.mobilint_layout import to_hwc
from lightning_npu.compile.samples import Samples
from lightning_npu.manifest import sha256_file
from lightning_npu.tensor_spec import TensorSpec

FOLDER = "calibration"


def write_calibration(samples: Samples, specs: Sequence[TensorSpec], kit: Path) -> list[list[dict[str, str]]]:
    """Write every sample; gives per sample and input, in order, the file's path in the kit and its SHA-256.

    Arrays have three axes: images are (H, W, C), tokens (1, tokens, features), vectors (1, 1, features). What the NPU
    takes as uint8 stays raw pixels from 0 to 255, everything else is float32. No file holds a pickle.

    Args:
        samples: what calibrates, in the order in which it was given.
        specs: what each input looks like; their layouts say where channels are.
        kit: the kit's folder.
    """
    folder = kit / FOLDER
    folder.mkdir()
    digits = max(4, len(str(samples.count - 1)))
    written: list[list[dict[str, str]]] = []
    for index in range(samples.count):
        entries = []
        for spec, tensor in zip(specs, samples.tensors, strict=True):
            array = to_hwc(tensor, spec, index)
            if spec.dtype != "uint8":
                array = array.astype(np.float32, copy=False)
            name = f"{index:0{digits}}.npy" if len(specs) == 1 else f"{index:0{digits}}/{spec.name}.npy"
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            _save(path, array)
            entries.append({"file": f"{FOLDER}/{name}", "sha256": sha256_file(path)})
        written.append(entries)
    return written


def _save(path: Path, array: np.ndarray[Any, Any]) -> None:
    with path.open("wb") as stream:
        np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)
