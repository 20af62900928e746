"""Demonstrations: recorded once with the scripted experts, cached on disk, augmented anew in every epoch."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from tqdm import tqdm

from cache import fingerprint, load_or_make
from policy import CHUNK

PIXEL_MEAN, PIXEL_STD = 110.0, 60.0


@dataclass(frozen=True)
class Recipe:
    """Which demonstrations to record.

    Attributes:
        tasks: Meta-World task names.
        per_task: environment seeds tried on each task; those that the expert fails are left out.
        first_seed: the first environment seed.
        noise: disturbance on every second seed, see ``demonstrate``.
        stride: an image is kept at every ``stride``-th step.
    """

    tasks: tuple[str, ...]
    per_task: int
    first_seed: int = 0
    noise: float = 0.6
    stride: int = 2


@dataclass(frozen=True)
class Frames:
    """Demonstrations as training samples, one for each kept image.

    Attributes:
        images: uint8, (frames, 3, 96, 96).
        states: float32, (frames, 4).
        actions: float32, (frames, 16, 4): the expert's actions from this step on; the last is repeated at the end.
        valid: bool, (frames, 16): False where an action lies beyond the end of the episode.
        episodes: int64, (frames,): the episode that the frame is from.
    """

    images: NDArray[np.uint8]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    valid: NDArray[np.bool_]
    episodes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.images)


def normalise(images: NDArray[np.uint8] | Tensor) -> Tensor:
    """Map uint8 pixels, any shape, to the float32 that the encoder takes."""
    return torch.as_tensor(images).float().sub_(PIXEL_MEAN).div_(PIXEL_STD)


def _record(job: tuple[str, Sequence[int], Recipe]) -> list[Any]:
    from environment import MetaWorldTask, demonstrate  # here: only these processes need a renderer

    name, seeds, recipe = job
    with MetaWorldTask(name) as task:
        return [
            demonstrate(task, seed, noise=recipe.noise if seed % 2 else 0.0, stride=recipe.stride) for seed in seeds
        ]


def record(recipe: Recipe, processes: int = 2) -> Frames:
    """Let the scripted experts demonstrate, in ``processes`` processes; the result does not depend on their number."""
    block = 5
    seeds = range(recipe.first_seed, recipe.first_seed + recipe.per_task)
    jobs = [(task, seeds[i : i + block], recipe) for task in recipe.tasks for i in range(0, len(seeds), block)]
    demonstrations: list[Any] = []
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(recipe.tasks) * len(seeds), desc="Recording demonstrations"))
        results: Iterable[list[Any]] = map(_record, jobs)
        if processes > 1:
            results = stack.enter_context(mp.get_context("spawn").Pool(processes)).imap(_record, jobs)
        for job, done in zip(jobs, results, strict=True):
            demonstrations += [demonstration for demonstration in done if demonstration is not None]
            bar.update(len(job[1]))
    if not demonstrations:
        raise RuntimeError(f"expected at least one successful demonstration, the experts solved none of {recipe}")
    images, states, actions, valid, episodes = [], [], [], [], []
    for episode, demonstration in enumerate(demonstrations):
        length = len(demonstration.actions)
        ahead = demonstration.steps[:, None] + np.arange(CHUNK)
        images.append(demonstration.images.transpose(0, 3, 1, 2))
        states.append(demonstration.states[demonstration.steps])
        actions.append(demonstration.actions[np.minimum(ahead, length - 1)])
        valid.append(ahead < length)
        episodes.append(np.full(len(ahead), episode))
    return Frames(*(np.concatenate(parts) for parts in (images, states, actions, valid, episodes)))


def _save(path: Path, frames: Frames) -> None:
    with path.open("wb") as file:
        np.savez(file, **{name: getattr(frames, name) for name in Frames.__dataclass_fields__})


def _load(path: Path) -> Frames:
    # Every array of the archive carries a checksum, which numpy verifies as it reads.
    with np.load(path, allow_pickle=False) as archive:
        frames = Frames(**{name: archive[name] for name in Frames.__dataclass_fields__})
    lengths = {len(getattr(frames, name)) for name in Frames.__dataclass_fields__}
    if len(lengths) != 1 or frames.images.shape[1] != 3:
        raise ValueError(f"expected arrays of one length, got {sorted(lengths)}")
    return frames


def demonstrations(recipe: Recipe, cache: Path, processes: int = 2) -> Frames:
    """The recipe's demonstrations, from the cache where it has them. A damaged file is recorded again."""
    name = recipe.tasks[0] if len(recipe.tasks) == 1 else f"{len(recipe.tasks)}-tasks"
    path = cache / "demonstrations" / f"{name}-{recipe.per_task}-{fingerprint(asdict(recipe))}.npz"
    return load_or_make(path, _load, lambda: record(recipe, processes), _save)


class DemonstrationDataset(Dataset[dict[str, Tensor]]):
    """Frames, with a random shift of the image and noise on the state when training.

    The random numbers come from a generator of its own (one for each worker), so what is drawn depends on the seed and
    on the order of access alone, not on what the network draws in between.

    Args:
        frames: the demonstrations.
        augment: whether to shift and to add noise.
        seed: of the augmentation.
        shift: largest shift, in pixels, to each side; the edge is repeated.
        state_noise: standard deviation, in units of the states' own standard deviation.
    """

    def __init__(
        self, frames: Frames, *, augment: bool = True, seed: int = 0, shift: int = 4, state_noise: float = 0.05
    ) -> None:
        self.frames = frames
        self.augment = augment
        self.seed = seed
        self.shift = shift
        self.state_noise = state_noise * state_statistics(frames)[1]
        self._rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: images (3, 96, 96), state (4,), actions (16, 4), valid (16,)."""
        image, state = self.frames.images[index], self.frames.states[index]
        if self.augment:
            rng = self._generator()
            image = random_shift(image, self.shift, rng)
            state = state + (self.state_noise * rng.standard_normal(state.shape)).astype(np.float32)
        return {
            "images": normalise(image),
            "state": torch.from_numpy(state),
            "actions": torch.from_numpy(self.frames.actions[index]),
            "valid": torch.from_numpy(self.frames.valid[index]),
        }

    def _generator(self) -> np.random.Generator:
        if self._rng is None:
            worker = get_worker_info()
            self._rng = np.random.default_rng([self.seed, 0 if worker is None else worker.seed % 2**32])
        return self._rng


def random_shift(image: NDArray[np.uint8], largest: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shift a (3, h, w) image by up to ``largest`` pixels each way; the edge is repeated."""
    dy, dx = rng.integers(-largest, largest + 1, size=2)
    rows = np.clip(np.arange(image.shape[1]) + dy, 0, image.shape[1] - 1)
    columns = np.clip(np.arange(image.shape[2]) + dx, 0, image.shape[2] - 1)
    return image[:, rows][:, :, columns]


def state_statistics(frames: Frames) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and standard deviation (at least 0.01) of the states, each (4,)."""
    return frames.states.mean(0), np.maximum(frames.states.std(0), 0.01)


class Demonstrations(L.LightningDataModule):
    """The demonstrations of a recipe as batches.

    The tensor under "images" is exactly what the encoder receives: shifted and normalised here, in the loader, and not
    in the training step. That lets an accelerator encode the next batches ahead of time.

    Args:
        recipe: which demonstrations.
        cache: folder for what is recorded.
        batch_size: samples in a batch.
        seed: of shuffling and augmentation.
        processes: how many record in parallel.
    """

    def __init__(self, recipe: Recipe, cache: Path, *, batch_size: int = 32, seed: int = 0, processes: int = 2) -> None:
        super().__init__()
        self.recipe = recipe
        self.cache = cache
        self.batch_size = batch_size
        self.seed = seed
        self.processes = processes
        self.frames: Frames | None = None

    def prepare_data(self) -> None:
        """Record what the cache does not have."""
        demonstrations(self.recipe, self.cache, self.processes)

    def setup(self, stage: str) -> None:
        """Read the demonstrations."""
        if self.frames is None:
            self.frames = demonstrations(self.recipe, self.cache, self.processes)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled, augmented batches."""
        assert self.frames is not None, "setup() comes first"
        return DataLoader(
            DemonstrationDataset(self.frames, seed=self.seed),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def describe(self) -> str:
        """One line on what was recorded."""
        assert self.frames is not None, "setup() comes first"
        episodes = int(self.frames.episodes[-1]) + 1
        asked = len(self.recipe.tasks) * self.recipe.per_task
        return f"{episodes} demonstrations of {asked} seeds ({len(self.frames)} frames): {', '.join(self.recipe.tasks)}"
