"""Rolls a policy out in the simulator, on environment seeds that nothing else uses."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

from cache import whole_file
from environment import MetaWorldTask
from learner import BehaviourCloning

MAX_STEPS = 120
EXECUTED = 8
"""Of the 16 actions predicted, so many are carried out before the policy looks again."""


@dataclass(frozen=True)
class Outcome:
    """One episode.

    Attributes:
        seed: of the environment.
        solved: whether the task was solved within ``MAX_STEPS``.
        steps: control steps taken.
    """

    seed: int
    solved: bool
    steps: int


def rollout(
    model: BehaviourCloning, task: MetaWorldTask, seed: int, pictures: list[NDArray[np.uint8]] | None = None
) -> Outcome:
    """Let the policy act until the task is solved or ``MAX_STEPS`` are over; a picture of each step is appended."""
    observation = task.reset(seed)
    steps = 0
    while steps < MAX_STEPS:
        actions = model.act(observation.image, observation.state)
        for action in actions[: min(EXECUTED, MAX_STEPS - steps)]:
            if pictures is not None:
                pictures.append(task.picture())
            steps += 1
            if task.step(action):
                if pictures is not None:
                    pictures.append(task.picture())
                return Outcome(seed, True, steps)
        observation = task.observe()
    return Outcome(seed, False, steps)


# Of a worker process: it lives as long as the pool, so that model and renderer are set up once.
_model: BehaviourCloning
_task: MetaWorldTask


def _start(model: BehaviourCloning, task_name: str) -> None:
    global _model, _task
    torch.set_num_threads(1)
    _model = model.eval()
    _task = MetaWorldTask(task_name)


def _run(seed: int) -> Outcome:
    return rollout(_model, _task, seed)


def evaluate(model: BehaviourCloning, task_name: str, seeds: Sequence[int], processes: int = 2) -> list[Outcome]:
    """Roll out on each seed, in ``processes`` processes; the outcomes do not depend on their number.

    The model travels to the processes as it is, with the encoder that it was trained with, INT8 or not.
    """
    model.eval()
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        if processes > 1:
            pool = mp.get_context("spawn").Pool(processes, _start, (model, task_name))
            results: Iterable[Outcome] = stack.enter_context(pool).imap(_run, seeds)
        else:
            task = stack.enter_context(MetaWorldTask(task_name))
            results = (rollout(model, task, seed) for seed in seeds)
        bar = stack.enter_context(tqdm(results, total=len(seeds), desc="Rolling out"))
        for outcome in bar:
            outcomes.append(outcome)
            bar.set_postfix(solved=sum(o.solved for o in outcomes), refresh=False)
    return outcomes


def draw_rollout(model: BehaviourCloning, task_name: str, seed: int, path: Path, frames: int = 6) -> Outcome:
    """Write a strip of ``frames`` pictures of one rollout to ``path`` (PNG)."""
    pictures: list[NDArray[np.uint8]] = []
    with MetaWorldTask(task_name) as task:
        outcome = rollout(model.eval(), task, seed, pictures)
    chosen = np.linspace(0, len(pictures) - 1, frames).round().astype(int)
    figure = Figure(figsize=(2.2 * frames, 2.7), layout="constrained")  # without pyplot: no display, no global state
    for axis, index in zip(figure.subplots(1, frames), chosen, strict=True):
        axis.imshow(pictures[index])
        axis.set_title(f"step {index}", fontsize=9)
        axis.axis("off")
    result = f"solved in {outcome.steps} steps" if outcome.solved else f"not solved in {outcome.steps} steps"
    figure.suptitle(f"{task_name}, environment seed {seed}: {result}", fontsize=11)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    return outcome
