"""Reads the fake's .mblt files as the vendor's function reads its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def load_mblt_model(path: str) -> tuple[Any, Any]:
    parts = [
        SimpleNamespace(
            operators=[
                SimpleNamespace(layertype=f"LayerType.{kind}", name=name, inputs=inputs, outputs=outputs)
                for kind, name, inputs, outputs in layers
            ]
        )
        for layers in json.loads(Path(path).read_text())["subgraphs"]
    ]
    return SimpleNamespace(subgraphs=parts), {}
