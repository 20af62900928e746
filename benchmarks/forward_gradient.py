"""Forward gradients against backpropagation on eight small tasks: accuracy, forward calls, CPU seconds, memory.

``python benchmarks/forward_gradient.py [--quick] [--seeds 5] [--output results.json]``; results are kept after each run
in the file, and a second start goes on where the first one ended. Learning rates are chosen on the validation split of
the first seed, checkpoints on each seed's own; figures are of the test split, which nothing is chosen on.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forward_gradient_tasks import TASKS, Task, accuracy, calibrate
from torch import nn

from lightning_npu.forward_gradient import FixedPoint, ForwardGradient

BACKPROPAGATION_STEPS = 500
LITERAL = FixedPoint(weight_bits=8, headroom=0, min_eps_steps=0)


@dataclass(frozen=True)
class Method:
    """How a task is adapted.

    Attributes:
        rates: learning rates to choose from.
        options: of ``ForwardGradient``; None: Adam and backpropagation.
        int8: whether activations are rounded to 8 bits.
    """

    rates: tuple[float, ...]
    options: dict[str, Any] | None = None
    int8: bool = True


_BEST = {"eps": 1e-2, "m": 3, "estimator": "normalized"}
METHODS: dict[str, Method] = {
    "backpropagation": Method((1e-3, 3e-3, 1e-2), None, int8=False),
    "FF FP32": Method((1e-2, 3e-2, 1e-1), _BEST, int8=False),
    "16w8a": Method((1e-2, 3e-2, 1e-1), {**_BEST, "fixed_point": FixedPoint(16)}),
    "8w8a EF": Method(
        (1e-2, 3e-2, 1e-1), {**_BEST, "eps": 2e-2, "fixed_point": FixedPoint(8, headroom=0, rounding="error_feedback")}
    ),
    "8w8a literal": Method((1e-3, 1e-2, 1e-1), {"eps": 1e-3, "m": 3, "estimator": "sign", "fixed_point": LITERAL}),
}


def adapt(task: Task, method: Method, *, lr: float, steps: int, batch: int, seed: int) -> dict[str, float]:
    """Adapt a copy of the task's network; gives accuracies in percent, calls and CPU seconds.

    The checkpoint with the best validation accuracy counts, the untouched network among them.
    """
    net = copy.deepcopy(task.net)
    if method.int8:
        calibrate(net, task.calibration)
    net.requires_grad_(False)
    trained = [parameter for name, parameter in net.named_parameters() if name in task.trained]
    x, y = task.adapt
    body, head = _frozen_part(net, task)
    features = _features(body, x)
    scored = {name: (_features(body, split[0]), split[1]) for name, split in (("v", task.validate), ("t", task.test))}
    generator = torch.Generator().manual_seed(seed)
    optimizer: Any
    if method.options is None:
        for parameter in trained:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(trained, lr=lr)
    else:
        optimizer = ForwardGradient(trained, lr, seed=seed, **method.options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = accuracy(head, scored["v"])
    result = {"zero_shot": accuracy(head, scored["t"]), "test": accuracy(head, scored["t"]), "validation": best}
    started = time.thread_time()
    for step in range(1, steps + 1):
        index = torch.randint(len(y), (batch,), generator=generator) if batch < len(y) else torch.arange(len(y))
        inputs, labels = features[index], y[index]

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            loss = nn.functional.cross_entropy(head(inputs), labels)
            if loss.requires_grad:
                optimizer.zero_grad()
                loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            found = accuracy(head, scored["v"])
            if found >= best:
                best = found
                result |= {"test": accuracy(head, scored["t"]), "validation": found}
    result["seconds"] = time.thread_time() - started
    result["last"] = accuracy(head, scored["t"])
    result["calls"] = float(getattr(optimizer, "calls", steps))
    return result


def _frozen_part(net: nn.Sequential, task: Task) -> tuple[nn.Sequential, nn.Sequential]:
    """What comes before the first trained layer, and the rest; the former is computed once per sample."""
    first = min(int(name.split(".")[0]) for name in task.trained)
    return (net[:first], net[first:]) if first > 1 else (net[:0], net)


def _features(body: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return body(x)


def adapt_all(name: str, seed: int, steps: int, batch: int, known: dict[str, Any]) -> dict[str, Any]:
    """Every method on one task and seed, with each rate on the first seed and the chosen one on the others.

    What is in ``known`` is not run again. Gives results by ``task|method|seed|rate``.
    """
    torch.set_num_threads(1)
    task: Task | None = None
    found: dict[str, Any] = {}
    for title, method in METHODS.items():
        for lr in method.rates if seed == 0 else (known[f"{name}|{title}|lr"],):
            key = f"{name}|{title}|{seed}|{lr}"
            if key not in known:
                task = task or TASKS[name](seed)
                taken = steps if method.options is not None else BACKPROPAGATION_STEPS
                found[key] = adapt(task, method, lr=lr, steps=min(taken, steps), batch=batch, seed=seed)
    return found


def run(args: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Every task, seed and method, in ``args.jobs`` processes; what is in ``kept`` is not run again."""
    names = args.tasks or list(TASKS)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for seeds in ((0,), range(1, args.seeds)):  # the first seed chooses the rates
            cells = [(name, seed) for seed in seeds for name in names]
            waiting = [pool.submit(adapt_all, *cell, args.steps, args.batch, kept) for cell in cells]
            for done in as_completed(waiting):
                kept |= done.result()
                _store(args.output, kept)
                for key, result in done.result().items():
                    print(f"{key}: {json.dumps(result)}", flush=True)
            for name, (title, method) in itertools.product(names, METHODS.items()):
                runs = {lr: kept[f"{name}|{title}|0|{lr}"] for lr in method.rates}
                kept[f"{name}|{title}|lr"] = max(runs, key=lambda lr: runs[lr]["validation"])
    _store(args.output, kept)


def report(args: argparse.Namespace, kept: dict[str, Any]) -> None:
    """The table, and how far each method is from backpropagation and from its FP32 twin."""
    print("\naccuracy on the test split in %, mean +- standard deviation over seeds; [gap to backpropagation]\n")
    print(f"| task | zero-shot | {' | '.join(METHODS)} |\n|---|---|{'---|' * len(METHODS)}")
    means: dict[str, dict[str, float]] = {title: {} for title in METHODS}
    for name in TASKS:
        cells = []
        for title in METHODS:
            results = [kept.get(f"{name}|{title}|{s}|{kept.get(f'{name}|{title}|lr')}") for s in range(args.seeds)]
            found = [result["test"] for result in results if result]
            if not found:
                break
            mean, spread = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else math.nan
            means[title][name] = mean
            gap = f" [{mean - means['backpropagation'][name]:+.1f}]" if title != "backpropagation" else ""
            cells.append(f"{mean:.1f} +- {spread:.1f}{gap}" + (f" (n={len(found)})" if len(found) < args.seeds else ""))
        if len(cells) == len(METHODS):
            zero = statistics.mean(
                kept[f"{name}|FF FP32|{s}|{kept[f'{name}|FF FP32|lr']}"]["zero_shot"]
                for s in range(args.seeds)
                if f"{name}|FF FP32|{s}|{kept[f'{name}|FF FP32|lr']}" in kept
            )
            print(f"| {name} | {zero:.1f} | {' | '.join(cells)} |")
    for title in ("FF FP32", "16w8a", "8w8a EF", "8w8a literal"):
        gaps = {name: mean - means["backpropagation"][name] for name, mean in means[title].items()}
        near = sum(gap >= -5 for gap in gaps.values())
        twin = statistics.mean(mean - means["FF FP32"][name] for name, mean in means[title].items())
        print(f"{title}: within 5 points of backpropagation on {near} of {len(gaps)} tasks; {twin:+.2f} to FF FP32")
    for title in METHODS:
        found = [value for key, value in kept.items() if f"|{title}|" in key and isinstance(value, dict)]
        calls, seconds = (statistics.mean(result[entry] for result in found) for entry in ("calls", "seconds"))
        print(f"{title}: {calls:.0f} forward calls, {seconds:.1f} CPU s per run on average")


def memory() -> None:
    """Peak memory of training beside inference, each in a process of its own: a ViT-tiny, all weights trained."""
    script = str(Path(__file__).with_name("forward_gradient_memory.py"))
    peaks = {}
    for mode in ("inference", "forward", "fixed16", "fixed8", "backward"):
        done = subprocess.run([sys.executable, script, mode], capture_output=True, text=True, check=True)
        peaks[mode] = int(done.stdout)
    print("\npeak memory, weights included, ViT-tiny (5.5 M parameters) at 224 x 224, batch 8:")
    for mode, peak in peaks.items():
        print(f"  {mode}: {peak / 2**20:.0f} MiB, {peak / peaks['inference']:.2f} x inference")


def _store(path: Path, kept: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(kept, indent=1))
    temporary.replace(path)


def main() -> None:
    """Run what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps: only to see that it runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=3000, help=f"of forward gradients; backpropagation takes {BACKPROPAGATION_STEPS}"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, of one thread each")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS))
    parser.add_argument("--output", type=Path, default=Path("outputs/forward_gradient.json"))
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.output = 1, 100, args.output.with_name("forward_gradient_quick.json")
    torch.set_num_threads(1)
    settings = {"steps": args.steps, "batch": args.batch}
    kept = json.loads(args.output.read_text()) if args.output.exists() else {"settings": settings}
    if kept.get("settings") != settings:
        raise SystemExit(
            f"{args.output} is of other settings: {kept.get('settings')}. Name another --output, or remove it."
        )
    if not args.report:
        run(args, kept)
    report(args, kept)
    memory()


if __name__ == "__main__":
    main()
