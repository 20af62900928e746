"""A robot's camera has drifted; a correction before its frozen INT8 encoder is trained through the INT8 encoder alone.

    python examples/forward_gradient/drifted_camera.py --cache outputs
    python examples/forward_gradient/drifted_camera.py --cache outputs --episodes 20      # sooner

The policy is that of examples/robot_policy (offload L4: the whole encoder runs in INT8 outside of torch), and is
trained first if the cache does not have it. Neither its encoder nor its action expert changes any more. The
correction is learnt from drifted demonstrations by the same loss, optimizer and Trainer as the policy was; what is
new is ``gradient=`` at the encoder. The oracle trains the same correction by backpropagation through the FP32
encoder, which a device does not have. Both are judged in the simulator, through the INT8 encoder.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import lightning_npu as npu
import numpy as np
import torch
from lightning_npu.forward_gradient import Bridge, Colour, LowFrequency
from numpy.typing import NDArray
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "robot_policy"))

import train
from cache import write_json
from camera import Correction, Drift
from data import Demonstrations
from evaluate import evaluate
from intervals import wilson
from learner import BehaviourCloning
from stage1 import load_encoder

STRUCTURES = {"pixels": None, "low-frequency": LowFrequency(8), "colour": Colour()}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cache", type=Path, default=Path("outputs"), help="of examples/robot_policy (default: %(default)s)")
    add("--episodes", type=int, default=100, help="environment seeds (default: %(default)s)")
    add("--first-episode", type=int, default=train.FIRST_EPISODE, help="the first of them (default: %(default)s)")
    add("--steps", type=int, default=300, help="of training the correction (default: %(default)s)")
    add("--m", type=int, default=2, help="directions per step (default: %(default)s)")
    add("--structure", choices=STRUCTURES, default="colour", help="of the directions (default: %(default)s)")
    add("--learning-rate", type=float, default=0.03, help="default: %(default)s")
    add("--batch-size", type=int, default=32, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the correction's training (default: %(default)s)")
    add("--processes", type=int, default=2, help="for the rollouts (default: %(default)s)")
    add("--threads", type=int, default=train.half_the_cores(), help="of torch (default: %(default)s here)")
    add("--only", nargs="*", choices=("clean", "before", "after", "oracle"), help="default: all four")
    return parser.parse_args(arguments)


class DriftedPolicy(BehaviourCloning):
    """A trained policy that looks through a drifted camera; only a correction before its encoder is trained.

    Args:
        policy: the trained policy; its expert is copied.
        encoder: what its images go through, frozen.
        drift: of the camera; None: it is as it was.
        learning_rate: the peak of the schedule.
    """

    def __init__(
        self, policy: BehaviourCloning, encoder: nn.Module, drift: Drift | None, learning_rate: float = 0.03
    ) -> None:
        super().__init__(
            nn.Sequential(Correction(), encoder),
            policy.state_mean.numpy(),
            policy.state_std.numpy(),
            freeze_encoder=False,  # the gradient goes through the encoder; what is inside does not change
            learning_rate=learning_rate,
            weight_decay=0.0,
        )
        self.drift = drift
        self.expert = copy.deepcopy(policy.expert)
        self.requires_grad_(False)
        self.correction.requires_grad_(True)
        self.train()

    @property
    def correction(self) -> Correction:
        """What is trained."""
        correction = self.encoder[0]  # type: ignore[index]
        assert isinstance(correction, Correction)
        return correction

    def train(self, mode: bool = True) -> DriftedPolicy:
        """All but the correction is frozen, and so is its dropout."""
        super().train(False)
        return self

    def act(self, image: NDArray[np.uint8], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """The next actions, from what the drifted camera sees."""
        if self.drift is not None:
            image = self.drift(image.transpose(2, 0, 1)).transpose(1, 2, 0)
        return super().act(image, state)


def fit(model: DriftedPolicy, data: Demonstrations, args: argparse.Namespace) -> dict[str, Any]:
    """Train the correction on demonstrations that the drifted camera saw; returns what it took."""
    assert data.frames is not None
    assert model.drift is not None
    L.seed_everything(args.seed)
    drifted = Demonstrations(data.recipe, data.cache, batch_size=args.batch_size, seed=args.seed)
    drifted.frames = replace(data.frames, images=model.drift(data.frames.images))
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # all, on purpose
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # torch and Lightning's matter
    trainer = L.Trainer(
        devices=1,
        max_steps=args.steps,
        max_epochs=math.ceil(args.steps / (len(drifted.frames) // args.batch_size)),
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    trainer.fit(model, drifted.train_dataloader())
    return {"seconds": time.perf_counter() - began, "last_loss": float(trainer.callback_metrics["loss"])}


def main() -> None:
    """Train and judge; print the table and keep it as ``drifted_camera.json`` in the cache."""
    args = parse()
    torch.set_num_threads(args.threads)
    trained = train.trained(train.parse(["--cache", str(args.cache), "--threads", str(args.threads)]))
    artifact = trained.model.encoder.artifact  # type: ignore[union-attr]
    assert isinstance(artifact, npu.Artifact)
    bridge = Bridge(m=args.m, structure=STRUCTURES[args.structure], seed=args.seed)
    drift, rate = Drift(), args.learning_rate

    def policy(drift: Drift | None, **options: Any) -> DriftedPolicy:
        encoder = npu.NPUFrozenModule(artifact, runtime_options={"threads": 1}, **options)
        return DriftedPolicy(trained.model, encoder, drift, rate)

    took: dict[str, Any] = {}
    policies: dict[str, DriftedPolicy] = {}
    for name in args.only or ("clean", "before", "after", "oracle"):
        if name == "after":
            policies[name] = policy(drift, gradient=bridge)
            took[name] = fit(policies[name], trained.data, args)
            took[name]["npu"] = policies[name].encoder[1].stats  # type: ignore[index, union-attr]
        elif name == "oracle":
            exact = DriftedPolicy(trained.model, load_encoder(), drift, rate)
            took[name] = fit(exact, trained.data, args)
            policies[name] = policy(drift)
            policies[name].correction.load_state_dict(exact.correction.state_dict())
        else:
            policies[name] = policy(drift if name == "before" else None)

    seeds = range(args.first_episode, args.first_episode + args.episodes)
    solved = {
        name: [outcome.solved for outcome in evaluate(model, "button-press-v3", seeds, args.processes)]
        for name, model in policies.items()
    }
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    write_json(args.cache / "drifted_camera.json", {"options": options, "solved": solved, "took": took})
    print(json.dumps(took, indent=1, default=str))
    report(solved)


def report(solved: dict[str, list[bool]]) -> None:
    """Success of each, and the share of the loss that was regained."""
    titles = {
        "clean": "camera as it was",
        "before": "camera drifted",
        "after": "corrected, trained through INT8",
        "oracle": "corrected, trained through FP32 (oracle)",
    }
    share = {name: sum(each) / len(each) for name, each in solved.items()}
    for name, each in solved.items():
        low, high = wilson(sum(each), len(each))
        regained = ""
        if name in ("after", "oracle") and {"clean", "before"} <= set(solved) and share["clean"] > share["before"]:
            regained = (
                f", {(share[name] - share['before']) / (share['clean'] - share['before']):.0%} of the loss regained"
            )
        print(f"{titles[name]:42} {sum(each)}/{len(each)} = {share[name]:.0%} [{low:.0%}, {high:.0%}]{regained}")


if __name__ == "__main__":
    main()
