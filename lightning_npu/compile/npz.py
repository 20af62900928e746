"""Samples on disk: one array per input in an .npz file, written without pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from lightning_npu.compile.samples import Samples


def save_samples(samples: Samples, path: Path) -> None:
    """Write every input's samples under its name; ``np.load(path, allow_pickle=False)`` reads them."""
    with zipfile.ZipFile(path, "w") as archive:  # np.savez takes no input that is called "file"
        for spec, tensor in zip(samples.specs, samples.tensors, strict=True):
            with archive.open(f"{spec.name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, tensor.contiguous().numpy(), allow_pickle=False)
