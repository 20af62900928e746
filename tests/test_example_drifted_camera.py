"""examples/forward_gradient: only the correction before the encoder is trained, and through the encoder's own calls."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if importlib.util.find_spec("metaworld") is None:
    pytest.skip("pip install 'lightning-npu[robot]'", allow_module_level=True)
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
for folder in ("robot_policy", "forward_gradient"):
    sys.path.insert(0, str(EXAMPLES / folder))

import camera  # noqa: E402
import data  # noqa: E402
import policy  # noqa: E402
from learner import BehaviourCloning  # noqa: E402
from test_example_robot_policy import some_frames  # noqa: E402

import lightning_npu as npu  # noqa: E402
from lightning_npu.forward_gradient import Bridge, Colour  # noqa: E402
from lightning_npu.runtimes import SimulatedRuntime  # noqa: E402


def test_the_drift_keeps_eight_bits_and_the_identity_keeps_all() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 5), dtype=np.uint8)
    same = camera.Drift(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), gain=1.0, gamma=1.0)
    assert np.array_equal(same(images), images)
    drifted = camera.Drift()(images)
    assert drifted.dtype == np.uint8
    assert np.array_equal(camera.Drift()(images[1]), drifted[1]), "with a batch axis or without"
    assert drifted[:, 2].mean() < 0.6 * images[:, 2].mean(), "blue is nearly gone"


def test_a_fresh_correction_changes_nothing() -> None:
    images = torch.randn(2, 3, 4, 4)
    assert torch.equal(camera.Correction()(images), images)


def test_only_the_correction_is_trained_and_by_calls_of_the_device(tmp_path: Path) -> None:
    from drifted_camera import DriftedPolicy, fit

    torch.manual_seed(0)
    frames = some_frames()
    trained = BehaviourCloning(policy.VisualEncoder(), *data.state_statistics(frames), freeze_encoder=True)
    recorded = data.Demonstrations(data.Recipe(("none",), 1), tmp_path, batch_size=4)
    recorded.frames = frames
    runtime = SimulatedRuntime(policy.VisualEncoder().eval(), latency_s=0.0)
    frozen = npu.NPUFrozenModule.from_runtime(runtime, gradient=Bridge(m=2, structure=Colour()))
    model = DriftedPolicy(trained, frozen, camera.Drift())
    before = {name: value.clone() for name, value in model.named_parameters()}
    took = fit(model, recorded, argparse.Namespace(batch_size=4, seed=0, steps=3))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"encoder.0.matrix", "encoder.0.offset"}
    assert took["last_loss"] > 0
    assert frozen.stats["gradient"]["samples"] == 3 * 2 * 2 * 4
    image = frames.images[0].transpose(1, 2, 0)
    actions = model.act(image, frames.states[0])
    assert actions.shape == (16, 4)
    model.drift = None
    assert not np.allclose(model.act(image, frames.states[0]), actions), "the policy acts on what the camera sees"
    frozen.close()
