"""Stage 2: a new task, the encoder frozen and offloaded, the action expert trained in FP32, the policy rolled out.

    python examples/robot_policy/train.py --offload L4
    python examples/robot_policy/table.py

Demonstrations, the compiled encoder and the trained policy are kept below ``--cache``; what is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import lightning_npu as npu
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource, SquareWave

from cache import fingerprint, sha256_of, whole_file, write_json
from data import Demonstrations, Recipe, normalise, state_statistics
from evaluate import draw_rollout, evaluate
from learner import BehaviourCloning
from policy import VisualEncoder
from results import NOTE, machine, read_results, table, why_no_energy
from stage1 import STAGE1_FILE, load_encoder

CUTS = {"L0": "stem", "L1": "layers.0", "L2": "layers.1", "L3": "layers.2", "L4": None}
"""Where each condition cuts the encoder; L4 offloads all of it."""

FIRST_EPISODE = 100_000
"""Environment seeds from here on are for the evaluation alone. Whoever tunes something uses --first-episode 50000."""


CHECKPOINT, TIMING = "policy.ckpt", "training.json"


def half_the_cores() -> int:
    """Threads for torch: the runtime takes the other half of the cores, and threads that wait for a core slow all."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def parse(arguments: list[str] | None = None, description: str | None = __doc__) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", default="button-press-v3", help="Meta-World task (default: %(default)s)")
    add("--offload", choices=("none", *CUTS), default="L4", help="how much of the encoder (default: %(default)s)")
    add("--encoder", choices=("stage1", "random"), default="stage1", help="random: the control (default: %(default)s)")
    add("--recipe", choices=("faithful", "fast"), default="faithful", help="of the INT8 build (default: %(default)s)")
    add("--prefetch", type=depth, default="auto", help="batches to encode ahead, 0: none (default: %(default)s)")
    add("--balance", type=share, default="off", help="'auto' or a share: the rest is encoded in FP32 (default: off)")
    add("--logger", choices=("csv", "tensorboard", "wandb"), default="csv", help="default: %(default)s")
    add("--power", choices=("sensors", "simulated"), default="sensors", help="simulated: to see how energy is drawn")
    add("--seed", type=int, default=0, help="of the training (default: %(default)s)")
    add("--demos", type=int, default=200, help="environment seeds for demonstrations (default: %(default)s)")
    add("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="default: %(default)s")
    add("--episodes", type=int, default=50, help="rollouts (default: %(default)s)")
    add("--first-episode", type=int, default=FIRST_EPISODE, help="first environment seed (default: %(default)s)")
    add("--processes", type=int, default=2, help="for recording and for rolling out (default: %(default)s)")
    add("--threads", type=int, default=half_the_cores(), help="of torch in training (default: %(default)s here)")
    add("--cache", type=Path, default=Path("outputs"), help="folder for everything (default: %(default)s)")
    add("--retrain", action="store_true", help="train even where the trained policy is in the cache")
    return parser.parse_args(arguments)


def depth(text: str) -> int | str:
    """A number of batches, or "auto"."""
    return text if text == "auto" else int(text)


def share(text: str) -> float | str:
    """A share of the batches, "auto" or "off"."""
    return text if text in ("auto", "off") else float(text)


def build_encoder(kind: str, data: Demonstrations) -> VisualEncoder:
    """The stage-1 encoder, or the control: random weights, with batch-norm statistics from the demonstrations."""
    if kind == "stage1":
        return load_encoder()
    assert data.frames is not None
    encoder = VisualEncoder()
    for norm in (m for m in encoder.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.momentum = None  # a plain average over the batches
    with torch.no_grad():
        for start in range(0, min(len(data.frames), 1024), 64):
            encoder.train()(normalise(data.frames.images[start : start + 64]))
    return encoder.eval()


def offload(model: BehaviourCloning, data: Demonstrations, args: argparse.Namespace) -> npu.Artifact:
    """Swap the model's encoder for its INT8 build, which is compiled unless the cache has it."""
    weights = sha256_of(STAGE1_FILE)[:8] if args.encoder == "stage1" else "random"
    name = f"{args.task}-{args.demos}-{weights}-{args.offload}-{args.recipe}-seed{args.seed}"
    encoder = npu.offload(  # one line, and the encoder runs outside of torch
        model,
        "encoder",
        calibration=data.train_dataloader(),
        cut=CUTS[args.offload],
        target="onnx",
        recipe=args.recipe,
        min_sqnr_db=20.0 if args.encoder == "stage1" else None,  # random weights amplify rounding
        keep_reference=args.balance != "off",
        output=args.cache / "artifacts" / f"{name}.npu",
    )
    assert encoder.artifact is not None
    return encoder.artifact


def make_logger(kind: str, folder: Path) -> Logger:
    """Where curves go; WANDB_MODE=offline needs no account."""
    if kind == "csv":
        return CSVLogger(folder, name="logs")
    if kind == "tensorboard":
        return TensorBoardLogger(folder, name="logs")
    return WandbLogger(project="robot-policy", name=folder.name, save_dir=folder)


def power_sources(kind: str) -> Any:
    """What the meter reads: the sensors of the boards that are used, or boards that are simulated and say so."""
    if kind == "sensors":
        return "auto"
    gpu = SimulatedBoard(SquareWave(60.0, 180.0, period_s=0.7), name="gpu", kind="gpu", counter=True, update_s=0.1)
    accelerator = SimulatedBoard(SquareWave(8.0, 25.0, period_s=0.3), name="npu", kind="npu", update_s=0.1)
    return [SimulatedSource([gpu, accelerator])]


def energy_of(report: dict[str, Any]) -> dict[str, Any]:
    """What the result keeps of the meter's report; None where no sensor could be read, and the reasons."""
    return {
        "per_sample_j": report["per_sample_j"],
        "per_sample_uncertainty_j": report["per_sample_uncertainty_j"],
        "total": report["total"],
        "no_power_sensor": report["no_power_sensor"],
    }


def fit(model: BehaviourCloning, data: Demonstrations, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train the action expert and keep it; returns what it took: time, time of all threads together, energy."""
    L.seed_everything(args.seed)  # from here on all conditions draw the same numbers
    torch.set_num_threads(args.threads)
    assert data.frames is not None
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # the encoder, on purpose
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # torch and Lightning's matter
    prefetch = npu.Prefetch(args.prefetch, balance=args.balance)  # the next batches are encoded while this one trains
    meter = npu.EnergyMeter(power_sources(args.power), prefetch)  # joules of every board that this run uses
    trainer = L.Trainer(
        devices=1,
        callbacks=[meter],
        max_steps=args.steps,
        max_epochs=math.ceil(args.steps / (len(data.frames) // args.batch_size)),
        gradient_clip_val=1.0,
        logger=make_logger(args.logger, folder),
        log_every_n_steps=20,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    trainer.fit(model, datamodule=data)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    samples = args.steps * args.batch_size
    timing: dict[str, Any] = {"training_s": seconds, "training_cpu_s": cpu_seconds, "samples_per_s": samples / seconds}
    if args.offload != "none":
        seen = prefetch.statistics
        timing |= {"hit_rate": seen.hit_rate, "wait_s": seen.wait_s, "share_offloaded": prefetch.balancer.share}
    if meter.report is not None:
        timing["energy"] = energy_of(meter.report)
        timing["device_failures"] = meter.report["failures"]
    write_json(folder / TIMING, timing)
    with whole_file(folder / CHECKPOINT) as temporary:
        trainer.save_checkpoint(temporary, weights_only=True)
    return timing


def restore(model: BehaviourCloning, folder: Path) -> dict[str, Any] | None:
    """Load the policy that ``fit`` left in ``folder`` and return its timing; None where it is absent or damaged."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        weights = torch.load(path, weights_only=True)["state_dict"]
        timing: dict[str, Any] = json.loads((folder / TIMING).read_text())
    except Exception as broken:  # whatever is wrong with a cache, the remedy is the same
        print(f"{path} is damaged ({broken}); training again")
        return None
    model.load_state_dict(weights)
    print(f"reusing {path}; --retrain trains again")
    return timing


@dataclass(frozen=True)
class Trained:
    """A trained policy and how it came about.

    Attributes:
        model: with its encoder in place, INT8 or not.
        data: the demonstrations.
        folder: of the run.
        settings: what decides the result.
        timing: what the training took.
        fidelity: of the INT8 encoder, per output.
    """

    model: BehaviourCloning
    data: Demonstrations
    folder: Path
    settings: dict[str, Any]
    timing: dict[str, Any]
    fidelity: dict[str, Any]


def trained(args: argparse.Namespace) -> Trained:
    """The policy of one condition: from the cache, or trained on demonstrations from the cache, or on new ones."""
    recipe = Recipe((args.task,), args.demos)
    data = Demonstrations(recipe, args.cache, batch_size=args.batch_size, seed=args.seed, processes=args.processes)
    data.prepare_data()
    data.setup("fit")
    print(data.describe())
    assert data.frames is not None

    L.seed_everything(args.seed)
    model = BehaviourCloning(build_encoder(args.encoder, data), *state_statistics(data.frames), freeze_encoder=True)
    settings = {
        "task": args.task,
        "offload": args.offload,
        "encoder": args.encoder,
        "encoder_sha256": sha256_of(STAGE1_FILE) if args.encoder == "stage1" else None,
        "recipe": args.recipe if args.offload != "none" else None,
        "demonstrations": asdict(recipe),
        "seed": args.seed,
        "demos": args.demos,
        "steps": args.steps,
        "batch_size": args.batch_size,
    }
    if args.power != "sensors":
        settings["power"] = args.power
    fidelity: dict[str, Any] = {}
    if args.offload != "none":
        artifact = offload(model, data, args)
        if args.balance != "off":
            settings["balance"] = args.balance
        settings["artifact"] = artifact.fingerprint  # features of another build are not what the expert was trained on
        fidelity = {name: asdict(figures) for name, figures in artifact.fidelity.items()}
    name = f"{args.task}-{args.offload}-{args.encoder}-seed{args.seed}-{fingerprint(settings)}"
    folder = args.cache / "runs" / name

    timing = None if args.retrain else restore(model, folder)
    if timing is None:
        timing = fit(model, data, args, folder)
    return Trained(model, data, folder, settings, timing, fidelity)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One condition, from the demonstrations to the result, which is also written to ``result.json``."""
    done = trained(args)
    seeds = range(args.first_episode, args.first_episode + args.episodes)
    began = time.perf_counter()
    outcomes = evaluate(done.model, args.task, seeds, args.processes)
    result = {
        **done.settings,
        **done.timing,
        "evaluation_s": time.perf_counter() - began,
        "episode_seeds": [args.first_episode, args.episodes],
        "solved": [outcome.solved for outcome in outcomes],
        "episode_steps": [outcome.steps for outcome in outcomes],
        "fidelity": done.fidelity,
        "machine": machine(),
    }
    write_json(done.folder / "result.json", result)
    picture = done.folder / "rollout.png"
    draw_rollout(done.model, args.task, seeds[0], picture)
    print(f"picture of a rollout: {picture}")
    return result


def main() -> None:
    """Run one condition and print the table over all that the cache has."""
    args = parse()
    run(args)
    results = read_results(args.cache / "runs")
    print(f"\n{table(results)}\n\n{NOTE}{why_no_energy(results)}")


if __name__ == "__main__":
    main()
