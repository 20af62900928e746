"""Stage 1: train the whole policy end to end on several tasks, and keep its encoder as a small file.

    python examples/robot_policy/pretrain.py

The button-press tasks of stage 2 are not among them.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from data import Demonstrations, Recipe, state_statistics
from learner import BehaviourCloning
from policy import VisualEncoder
from stage1 import STAGE1_FILE, save_encoder

TASKS = (
    "coffee-button-v3",
    "door-close-v3",
    "door-lock-v3",
    "door-open-v3",
    "drawer-close-v3",
    "drawer-open-v3",
    "faucet-open-v3",
    "handle-press-side-v3",
    "handle-press-v3",
    "plate-slide-v3",
    "window-close-v3",
    "window-open-v3",
)


def main() -> None:
    """Record the demonstrations, train, save the encoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--demos", type=int, default=40, help="environment seeds on each task (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="default: %(default)s")
    parser.add_argument("--precision", default="bf16-mixed", help="the Trainer's (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=Path("outputs"), help="folder (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=STAGE1_FILE, help="file to write (default: %(default)s)")
    args = parser.parse_args()

    L.seed_everything(args.seed)
    data = Demonstrations(Recipe(TASKS, args.demos), args.cache, batch_size=args.batch_size, seed=args.seed)
    data.prepare_data()
    data.setup("fit")
    print(data.describe())
    assert data.frames is not None
    encoder = VisualEncoder().to(memory_format=torch.channels_last)
    model = BehaviourCloning(
        encoder, *state_statistics(data.frames), freeze_encoder=False, weight_decay=args.weight_decay
    )
    trainer = L.Trainer(
        max_steps=args.steps,
        devices=1,
        precision=args.precision,
        gradient_clip_val=1.0,
        log_every_n_steps=20,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=CSVLogger(args.cache, name="pretrain"),
    )
    began = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - began
    made_by = {
        "command": " ".join(["python", *sys.argv]),
        "recipe": asdict(data.recipe),
        "frames": len(data.frames),
        "steps": args.steps,
        "batch_size": args.batch_size,
        "precision": args.precision,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "final_loss": round(float(trainer.callback_metrics["loss"]), 4),
        "training_seconds": round(seconds),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
    }
    save_encoder(encoder.to(memory_format=torch.contiguous_format), args.output, made_by)
    print(f"wrote {args.output} ({args.output.stat().st_size / 1e6:.2f} MB) after {seconds:.0f} s of training")


if __name__ == "__main__":
    main()
