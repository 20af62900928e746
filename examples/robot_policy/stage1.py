"""The stage-1 encoder as a file that can live in the repository: 16-bit weights in a NumPy archive, no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache import sha256_of, whole_file, write_json
from policy import VisualEncoder

STAGE1_FILE = Path(__file__).resolve().parent / "stage1_encoder.npz"


def save_encoder(encoder: VisualEncoder, path: Path, made_by: dict[str, Any]) -> None:
    """Write the encoder to ``path``, and beside it a ``.json`` with its SHA-256 and with what made it."""
    arrays = {}
    for name, tensor in encoder.state_dict().items():
        # Batch norm's statistics and scales are few and may be small: they keep 32 bits.
        arrays[name] = tensor.half().numpy() if tensor.ndim > 1 else tensor.numpy()
    with whole_file(path) as temporary:
        np.savez_compressed(temporary, **arrays)
    write_json(path.with_suffix(".json"), {"sha256": sha256_of(path), **made_by})


def load_encoder(path: Path = STAGE1_FILE) -> VisualEncoder:
    """Read an encoder in FP32, in eval mode.

    Raises:
        FileNotFoundError: where the file or its ``.json`` is absent.
        ValueError: where the file is not the one that the ``.json`` describes.
    """
    expected = json.loads(path.with_suffix(".json").read_text())["sha256"]
    actual = sha256_of(path)
    if actual != expected:
        raise ValueError(
            f"{path}: expected SHA-256 {expected}, got {actual}; "
            "restore the file from the repository or make it again with pretrain.py"
        )
    with np.load(path, allow_pickle=False) as archive:
        state = {name: torch.from_numpy(archive[name]) for name in archive.files}
    encoder = VisualEncoder()
    encoder.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in state.items()})
    return encoder.eval()
