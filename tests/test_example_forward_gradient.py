"""examples/forward_gradient: a classifier inside an INT8 artifact adapts by forward calls alone, and is saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lightning_npu as npu

pytest.importorskip("sklearn", reason="pip install scikit-learn")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "forward_gradient"
sys.path.insert(0, str(EXAMPLE))

import on_device_adaptation  # noqa: E402


def test_an_artifact_adapts_on_its_device(tmp_path: Path) -> None:
    output = tmp_path / "adapted.npu"
    found = on_device_adaptation.main(["--steps", "150", "--output", str(output)])
    assert found["after"] > found["before"] + 25  # 300 of 847 images; chance moves 15
    assert found["saved"] == pytest.approx(found["after"], abs=0.5)
    assert npu.Artifact.load(output).precision == "a8w8"
