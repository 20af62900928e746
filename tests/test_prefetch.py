"""Training with Prefetch is the same training, faster: same batches, same random numbers, bit-equal weights."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conftest import make_encoder, make_images
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lightning_npu as npu
from lightning_npu.lookahead import View
from lightning_npu.runtimes import SimulatedRuntime
from lightning_npu.runtimes.cpu import available_cores
from lightning_npu.worker import THREAD_NAME

IMAGES = make_images(40, seed=2)
TARGETS = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))


class Policy(pl.LightningModule):
    """Logs what it sees: the checksum of each batch and a random number drawn in each step."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 2)
        self.seen: list[Any] = []

    def encode(self, batch: Any) -> Tensor:
        return self.encoder(batch[0])[1]

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append((float(batch[0].sum()), float(torch.rand(())), random.random(), float(np.random.rand())))
        loss = nn.functional.mse_loss(self.head(self.encode(batch)), batch[1].to(self.head.weight.dtype))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("val", dataloader_idx, float(batch[0].sum())))
        self.log("val_loss", nn.functional.mse_loss(self.head(self.encode(batch)), batch[1]))

    def test_step(self, batch: Any, index: int) -> None:
        self.seen.append(("test", float(self.encode(batch).sum())))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.head(self.encode(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.01)


def simulated(**options: Any) -> tuple[npu.NPUFrozenModule, SimulatedRuntime]:
    runtime = SimulatedRuntime(make_encoder(), **{"latency_s": 0.0, **options})
    return npu.NPUFrozenModule.from_runtime(runtime), runtime


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, TARGETS), **{"batch_size": 4, "shuffle": True, **options})


def make_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**settings, **options})


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        yield


class Outcome:
    def __init__(self, policy: Policy, prefetch: npu.Prefetch | None, calls: int) -> None:
        self.weights = {name: value.clone() for name, value in policy.head.state_dict().items()}
        self.seen, self.prefetch, self.calls = policy.seen, prefetch, calls


def train(
    folder: Path,
    depth: int | str,
    *,
    make: Callable[[nn.Module], Policy] = Policy,
    loaders: Callable[[], tuple[Any, ...]] = lambda: (loader(),),
    times: int = 1,
    **options: Any,
) -> Outcome:
    pl.seed_everything(7, verbose=False)
    frozen, _ = simulated()
    policy = make(frozen)
    prefetch = npu.Prefetch(depth)
    trainer = make_trainer(folder, prefetch, **options)
    given = loaders()
    for _ in range(times):
        trainer.fit(policy, *given)
        trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + 2
    frozen.close()
    return Outcome(policy, prefetch, frozen.stats["calls"])


def assert_same(a: Outcome, b: Outcome) -> None:
    assert a.seen == b.seen
    for name, value in a.weights.items():
        assert torch.equal(value, b.weights[name]), name


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield IMAGES[index * 4 : index * 4 + 4], TARGETS[index * 4 : index * 4 + 4]


class SometimesNone(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return IMAGES[index], TARGETS[index], index


def skip_some(samples: list[Any]) -> Any:
    if samples[0][2] % 8 == 0:
        return None
    return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])


VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"limit_train_batches": 5},
    "limit_share": {"limit_train_batches": 0.5},
    "overfit": {"overfit_batches": 3},
    "accumulate": {"accumulate_grad_batches": 3},
    "max_steps": {"max_steps": 7},
    "max_steps_accumulate": {"max_steps": 3, "accumulate_grad_batches": 4},
    "fast_dev_run": {"fast_dev_run": 3},
    "validation": {"loaders": lambda: (loader(), loader(shuffle=False)), "num_sanity_val_steps": 2},
    "val_check": {"loaders": lambda: (loader(), loader(shuffle=False)), "val_check_interval": 3},
    "two_validation": {"loaders": lambda: (loader(), [loader(shuffle=False), loader(shuffle=False)])},
    "lengthless": {"loaders": lambda: (DataLoader(Endless(), batch_size=None),)},
    "none_batches": {"loaders": lambda: (DataLoader(SometimesNone(), batch_size=4, collate_fn=skip_some),)},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "twice": {"times": 2},
    "workers": {"loaders": lambda: (loader(num_workers=1, persistent_workers=True),)},
    "bf16": {"precision": "bf16-mixed"},
    "double": {"precision": "64-true"},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_training_is_the_same_with_and_without(tmp_path: Path, name: str) -> None:
    without, ahead = train(tmp_path, 0, **VARIATIONS[name]), train(tmp_path, 2, **VARIATIONS[name])
    assert_same(without, ahead)
    assert ahead.prefetch is not None
    assert ahead.prefetch.statistics.hits > 0, "nothing was asked for ahead: the comparison proves nothing"
    if "validation" not in name and "val" not in name:
        assert ahead.calls == without.calls, "the device computed what nobody used"


class ByDict(Policy):
    """Batches as dicts, the image nested, the encoder called by keyword."""

    def encode(self, batch: Any) -> Tensor:
        return self.encoder(images=batch[0])[1]


class Manual(Policy):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(encoder)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()


class EditsInPlace(Policy):
    def encode(self, batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return super().encode(batch)


class Augments(Policy):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.25 * torch.rand(()), batch[1]]


class Twice(Policy):
    """Calls the encoder twice on the same images, and edits the first result in between."""

    def encode(self, batch: Any) -> Tensor:
        first = self.encoder(batch[0])[1]
        first.mul_(2.0)
        return first + self.encoder(batch[0])[1]


class HookedAfter(Policy):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].flip(-1), batch[1]]


@pytest.mark.parametrize("make", [ByDict, Manual, EditsInPlace, Augments, Twice, HookedAfter])
def test_any_step_is_the_same_with_and_without(tmp_path: Path, make: type[Policy]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(train(tmp_path, 0, make=make), train(tmp_path, 2, make=make))


def statistics_of(tmp_path: Path, make: type[Policy], match: str) -> Any:
    with pytest.warns(UserWarning, match=match):
        outcome = train(tmp_path, 2, make=make, max_epochs=1)
    assert outcome.prefetch is not None
    return outcome.prefetch.statistics


def test_misses_are_counted_by_cause_and_explained_once(tmp_path: Path) -> None:
    edited = statistics_of(tmp_path, EditsInPlace, "edited in place")
    assert edited.misses["edited"] == 9
    assert edited.hits == 0
    augmented = statistics_of(tmp_path, Augments, "is no tensor of the batch")
    assert augmented.misses == {"not_a_batch_leaf": 10}
    twice = train(tmp_path, 2, make=Twice, max_epochs=1).prefetch
    assert twice is not None
    assert twice.statistics.hits == 9
    assert twice.statistics.misses == {"learning": 1, "asked_twice": 10}
    off = statistics_of(tmp_path, HookedAfter, "Prefetch is off: on_after_batch_transfer")
    assert off.hits == 0


# ---- inputs that are no batch leaf


class Normalises(Policy):
    def encode(self, batch: Any) -> Tensor:
        return self.encoder((batch[0] - 0.5) / 0.25)[1]


class SaysHow(Normalises):
    def npu_inputs(self, batch: Any) -> Tensor:
        return (batch[0] - 0.5) / 0.25


class SaysWrong(Normalises):
    def npu_inputs(self, batch: Any) -> Tensor:
        return (batch[0] - 0.5) / 0.26


class Fails(Normalises):
    def npu_inputs(self, batch: Any) -> Tensor:
        raise KeyError("observation.image")


def test_a_method_says_what_the_step_computes(tmp_path: Path) -> None:
    without, ahead = train(tmp_path, 0, make=SaysHow), train(tmp_path, 2, make=SaysHow)
    assert_same(without, ahead)
    assert ahead.prefetch is not None
    assert ahead.prefetch.statistics.hits >= 17  # the simulated device learns its inputs from the first call


@pytest.mark.parametrize(("make", "cause"), [(SaysWrong, "differs"), (Fails, "inputs_failed")])
def test_what_it_says_is_used_only_if_it_is_equal(tmp_path: Path, make: type[Policy], cause: str) -> None:
    with pytest.warns(UserWarning, match=r"inputs\(batch\) gave differs|inputs=\.\.\.\)\) failed") as told:
        ahead = train(tmp_path, 2, make=make)
    assert_same(train(tmp_path, 0, make=make), ahead)
    assert ahead.prefetch is not None
    assert ahead.prefetch.statistics.hits == 0
    assert ahead.prefetch.statistics.misses[cause] >= 17
    assert [told_of.filename for told_of in told if "on the spot" in str(told_of.message)] == [__file__]


def test_a_function_that_always_fails_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(UserWarning, match=r"inputs=\.\.\.\)\) failed"):
        train(tmp_path, 2, make=Fails)
    assert caplog.text.count("inputs(batch) failed") == 1


def test_calls_whose_input_is_trained_are_counted(tmp_path: Path) -> None:
    class Corrects(Policy):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__(encoder)
            self.gain = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self.head(self.encoder(batch[0] * self.gain)[1]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.gain, *self.head.parameters()], lr=0.01)

    frozen = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(make_encoder(), latency_s=0.0), gradient="forward")
    ahead = npu.Prefetch(2)
    make_trainer(tmp_path, ahead, max_steps=3).fit(Corrects(frozen), loader())
    assert dict(ahead.statistics.misses) == {"requires_grad": 3}
    frozen.close()


def test_without_a_frozen_module_it_says_that_it_does_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"Prefetch does nothing: Policy has no NPUFrozenModule(.|\n)*offload"):
        make_trainer(tmp_path, npu.Prefetch(), max_steps=1).fit(Policy(make_encoder()), loader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Prefetch does nothing")
        make_trainer(tmp_path, npu.EnergyMeter(), max_steps=1).fit(Policy(make_encoder()), loader())


def test_inputs_for_a_module_that_is_not_there_are_refused(tmp_path: Path) -> None:
    frozen, _ = simulated()
    trainer = make_trainer(tmp_path, npu.Prefetch(inputs={"vision": lambda batch: batch[0]}))
    with pytest.raises(npu.InputError, match=r"not frozen modules(.|\n)*'encoder'(.|\n)*'vision'"):
        trainer.fit(Policy(frozen), loader())
    frozen.close()


# ---- several modules and calls


class TwoCameras(Policy):
    """Two encoders, one of them nested and called once per camera."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(encoder)
        self.vision = nn.ModuleDict({"second": simulated()[0]})

    def encode(self, batch: Any) -> Tensor:
        left, right = batch[0]["left"], batch[0]["right"]
        features = self.encoder(left)[1] + self.encoder(right)[1] + self.vision["second"](images=right)[1]
        return features

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.encode(batch)), batch[1])


class Cameras(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"left": IMAGES[index], "right": IMAGES[-1 - index]}, TARGETS[index]


def test_several_modules_and_several_calls_a_step(tmp_path: Path) -> None:
    loaders = lambda: (DataLoader(Cameras(), batch_size=4, shuffle=True),)  # noqa: E731
    without = train(tmp_path, 0, make=TwoCameras, loaders=loaders)
    ahead = train(tmp_path, 2, make=TwoCameras, loaders=loaders)
    assert_same(without, ahead)
    assert ahead.prefetch is not None
    assert ahead.prefetch.statistics.hits == 3 * 19
    assert ahead.prefetch.statistics.misses == {"learning": 3}


# ---- evaluation, errors, other callbacks


def test_validate_test_and_predict_see_the_same(tmp_path: Path) -> None:
    def evaluate(depth: int) -> tuple[Any, Any]:
        pl.seed_everything(1, verbose=False)
        frozen, _ = simulated()
        policy = Policy(frozen)
        trainer = make_trainer(tmp_path, npu.Prefetch(depth), inference_mode=True)
        trainer.validate(policy, loader(shuffle=False), verbose=False)
        trainer.test(policy, loader(shuffle=False), verbose=False)
        predicted = trainer.predict(policy, loader(shuffle=False))
        frozen.close()
        return policy.seen, predicted

    (seen, predicted), (seen_ahead, predicted_ahead) = evaluate(0), evaluate(2)
    assert seen == seen_ahead
    assert all(torch.equal(a, b) for a, b in zip(predicted, predicted_ahead, strict=True))


class Stops(Policy):
    error: BaseException = ValueError("in the step")

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 4:
            raise self.error
        return super().training_step(batch, index)


@pytest.mark.parametrize("error", [ValueError("in the step"), KeyboardInterrupt()])
def test_errors_and_ctrl_c_leave_everything_as_it_was(tmp_path: Path, error: BaseException) -> None:
    frozen, _ = simulated()
    policy = Stops(frozen)
    policy.error = error
    trainer = make_trainer(tmp_path, npu.Prefetch(2))
    with contextlib.suppress(ValueError, SystemExit, KeyboardInterrupt):  # older versions return from fit
        trainer.fit(policy, loader())
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "batch_to_device" not in vars(trainer.strategy)
    assert "convert_input" not in vars(trainer.precision_plugin)
    assert frozen._ahead is None
    assert policy.encode([IMAGES[:4]]).shape == (4, 8)
    frozen.close()


def raises(results: Any) -> Any:
    raise OSError("link down")


def wrong_shape(results: Any) -> Any:
    return [result[:, :1] for result in results]


def not_a_number(results: Any) -> Any:
    results[0][0] = float("nan")
    return results


def one_output_too_few(results: Any) -> Any:
    return results[:1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raises, "failed on simulated device.*link down"),
        (wrong_shape, "answered with other shapes"),
        (one_output_too_few, "answered with other shapes"),
        (not_a_number, "answered NaN in output 'output_0'"),
    ],
)
def test_a_device_error_names_the_batch_and_the_device(tmp_path: Path, fault: Any, message: str) -> None:
    frozen, runtime = simulated()
    trainer = make_trainer(tmp_path, npu.Prefetch(2))
    original, calls = runtime._compute, itertools.count()

    def faulty(inputs: Any) -> Any:
        results = original(inputs)
        return fault(results) if next(calls) == 5 else results

    runtime._compute = faulty  # type: ignore[method-assign]
    with pytest.raises(
        npu.DeviceError, match=rf"batch 5 of the loader (.|\n)*'simulated' (on simulated device)?.*{message}"
    ):
        trainer.fit(Policy(frozen), loader(shuffle=False))
    assert "batch_to_device" not in vars(trainer.strategy)
    frozen.close()


def test_a_device_that_hangs_ends_the_training_and_not_the_process(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(make_encoder(), latency_s=0.0)
    frozen = npu.NPUFrozenModule.from_runtime(runtime, timeout_s=0.3)
    trainer = make_trainer(tmp_path, npu.Prefetch(2))
    original, calls, driver = runtime._compute, itertools.count(), threading.Event()

    def hangs(inputs: Any) -> Any:
        if next(calls) == 5:
            driver.wait(60)
        return original(inputs)

    runtime._compute = hangs  # type: ignore[method-assign]
    named = r"'simulated' on simulated device .* hangs: batch 5 of the loader(.|\n)*within 0.3 s"
    with pytest.raises(npu.DeviceError, match=named):
        trainer.fit(Policy(frozen), loader(shuffle=False))
    frozen.close()  # does not wait for what hangs
    driver.set()  # the driver comes back: the thread releases the device and ends
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(60)
    assert runtime._closed.is_set()


def test_a_loader_of_the_users_own_container_is_given_back(tmp_path: Path) -> None:
    from lightning.pytorch.utilities import CombinedLoader

    combined = CombinedLoader([loader()], "max_size_cycle")

    class FromList(Policy):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch[0], index)

    frozen, _ = simulated()
    make_trainer(tmp_path, npu.Prefetch(2), max_epochs=1).fit(FromList(frozen), combined)
    assert not any(isinstance(part, View) for part in combined.flattened)
    frozen.close()


def test_backbone_finetuning_of_an_offloaded_module_is_refused(tmp_path: Path) -> None:
    frozen, _ = simulated()
    policy = Policy(frozen)
    policy.backbone = nn.Sequential(policy.encoder)
    trainer = make_trainer(tmp_path, npu.Prefetch(), BackboneFinetuning())
    with pytest.raises(
        npu.InputError, match=r"BackboneFinetuning would unfreeze 'backbone'(.|\n)*learning rate of the head"
    ):
        trainer.fit(policy, loader())
    frozen.close()


class OffloadsLate(Policy):
    def setup(self, stage: str) -> None:
        if not isinstance(self.encoder, npu.NPUFrozenModule):
            self.encoder = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(self.encoder, latency_s=0.0))


def test_a_module_that_is_offloaded_in_setup_is_looked_ahead_for(tmp_path: Path) -> None:
    policy, prefetch = OffloadsLate(make_encoder()), npu.Prefetch()
    trainer = make_trainer(tmp_path, prefetch)
    trainer.fit(policy, loader())
    assert (prefetch.statistics.hits, prefetch.statistics.misses) == (19, {"learning": 1})
    assert "setup" not in vars(trainer.strategy)


class CalibratesAt(pl.Callback):
    def __init__(self, *steps: int) -> None:
        self.steps, self.alone, self.waits = steps, [], []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        prefetch = next(c for c in trainer.callbacks if isinstance(c, npu.Prefetch))
        self.alone.append(prefetch.calibrating)
        if trainer.global_step in self.steps:
            prefetch.calibrate(3)


@pytest.mark.parametrize("steps", [(3,), (0,), (8,), (9,), (2, 5), (19,)])
def test_calibration_leaves_device_and_training_their_own_time_and_the_result_as_it_was(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    plain = train(tmp_path, 2)
    pl.seed_everything(7, verbose=False)
    frozen, _ = simulated()
    policy, prefetch, calibrates = Policy(frozen), npu.Prefetch(2), CalibratesAt(*steps)
    make_trainer(tmp_path, prefetch, calibrates).fit(policy, loader())
    frozen.close()
    assert_same(plain, Outcome(policy, prefetch, 0))
    assert sum(calibrates.alone) <= prefetch.statistics.misses["calibration"]
    if steps in ((3,), (2, 5)):
        assert sum(calibrates.alone) >= 3
        assert prefetch.statistics.misses["calibration"] >= 4


def test_a_model_without_frozen_modules_is_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, npu.Prefetch(), max_epochs=1)
    trainer.fit(Policy(make_encoder()), loader())
    assert "batch_to_device" not in vars(trainer.strategy)


@pytest.mark.parametrize("depth", [-1, 1.5, "deep", True])
def test_a_wrong_depth_is_refused_where_it_was_written(depth: Any) -> None:
    with pytest.raises(npu.InputError, match=r"depth is wrong(.|\n)*'auto'"):
        npu.Prefetch(depth)


class Reuses:
    """Fills one buffer again and again, as some loaders do."""

    def __init__(self, buffers: int) -> None:
        self.buffers = [torch.empty(4, 3, 16, 16) for _ in range(buffers)]

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            buffer = self.buffers[index % len(self.buffers)]
            buffer.copy_(IMAGES[index * 4 : index * 4 + 4])
            yield [buffer, TARGETS[index * 4 : index * 4 + 4]]


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_a_loader_that_reuses_its_memory_is_never_misread(tmp_path: Path, buffers: int) -> None:
    without = train(tmp_path, 0, loaders=lambda: (Reuses(buffers),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ahead = train(tmp_path, 2, loaders=lambda: (Reuses(buffers),))
    assert_same(without, ahead)
    warned = any("uses the memory of a batch again" in str(warning.message) for warning in caught)
    assert warned == (buffers < 4)  # 2 ahead, the next and the last: four of its own are enough


def test_dropped_inputs_stay_on_the_host(tmp_path: Path) -> None:
    frozen, _ = simulated()
    policy = Policy(frozen)
    prefetch = npu.Prefetch(2, drop_inputs=True)
    make_trainer(tmp_path, prefetch, max_epochs=1).fit(policy, loader(shuffle=False))
    assert prefetch.statistics.hits == 9
    frozen.close()


class Stateful(DataLoader[Any]):
    """A loader that can be resumed in the middle of an epoch."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.position = self.position, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.position = index + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_resuming_in_the_middle_of_an_epoch_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    def run(depth: int) -> list[Any]:
        def stateful() -> DataLoader[Any]:
            return Stateful(TensorDataset(IMAGES, TARGETS), batch_size=4)

        pl.seed_everything(1, verbose=False)
        frozen, _ = simulated()
        first = Policy(frozen)
        trainer = make_trainer(tmp_path, npu.Prefetch(depth), max_steps=4)
        trainer.fit(first, stateful())
        trainer.save_checkpoint(tmp_path / f"{depth}.ckpt")
        second = Policy(frozen)
        make_trainer(tmp_path, npu.Prefetch(depth), max_steps=8).fit(
            second, stateful(), ckpt_path=tmp_path / f"{depth}.ckpt", **{}
        )
        frozen.close()
        return [entry[0] for entry in (*first.seen, *second.seen)]

    assert run(2) == run(0) == [float(IMAGES[i * 4 : i * 4 + 4].sum()) for i in range(8)]


class Counts(Policy):
    def on_train_end(self) -> None:
        path = Path(self.trainer.default_root_dir) / f"rank{self.global_rank}"
        path.write_text(json.dumps(sorted(entry[0] for entry in self.seen)))


def test_cores_are_split_between_the_artifact_and_torch(tmp_path: Path, compiled: npu.Artifact) -> None:
    frozen = npu.NPUFrozenModule(compiled.path, runtime_options={"threads": max(1, available_cores() - 1)})
    seen: list[int] = []

    class Looks(Policy):
        def on_train_start(self) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(available_cores())
    try:
        make_trainer(tmp_path, npu.Prefetch(2), max_epochs=1).fit(Looks(frozen), loader())
        assert torch.get_num_threads() == available_cores()
    finally:
        torch.set_num_threads(before)
    assert seen == [1]
    frozen.close()


@pytest.mark.parametrize("given_s", [0.005, 0.0001])
@pytest.mark.parametrize("fails", [False, True])
def test_threads_take_turns_more_often_while_it_looks_ahead(tmp_path: Path, given_s: float, fails: bool) -> None:
    frozen, _ = simulated()
    seen: list[float] = []

    class Looks(Policy):
        def on_train_start(self) -> None:
            seen.append(sys.getswitchinterval())
            if fails:
                raise KeyError("the user's own")

    before_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(given_s)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            make_trainer(tmp_path, npu.Prefetch(2), max_epochs=1).fit(Looks(frozen), loader())
        assert sys.getswitchinterval() == pytest.approx(given_s)
    finally:
        sys.setswitchinterval(before_s)
    assert seen == [pytest.approx(min(given_s, 0.0005))]
    frozen.close()


class Tunable(Policy):
    """With a learning rate and a batch size that Lightning's tuners may set."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(encoder)
        self.learning_rate, self.batch_size = 0.01, 2

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.encode(batch)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(batch_size=4, shuffle=False)


@pytest.mark.parametrize("tune", ["lr_find", "scale_batch_size"])
def test_tuners_find_the_same(tmp_path: Path, tune: str) -> None:
    from lightning.pytorch.tuner import Tuner

    def found(depth: int) -> Any:
        pl.seed_everything(3, verbose=False)
        frozen, _ = simulated()
        policy = Tunable(frozen)
        trainer = make_trainer(tmp_path, npu.Prefetch(depth), max_epochs=3)
        tuner = Tuner(trainer)
        if tune == "lr_find":
            tuner.lr_find(policy, num_training=12, min_lr=1e-4)
        else:
            tuner.scale_batch_size(policy, mode="power", max_trials=3, steps_per_trial=2, init_val=2)
        trainer.fit(policy)
        frozen.close()
        return policy.learning_rate, policy.batch_size, policy.head.weight.detach().clone()

    without, ahead = found(0), found(2)
    assert without[:2] == ahead[:2]
    assert torch.equal(without[2], ahead[2])


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path) -> None:
    frozen, _ = simulated()
    sizes: list[int] = []

    class Grows(Policy):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if self.trainer.global_step in (1000, 9999):
                gc.collect()
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                sizes.append(pages * 4096)
            return self.head(self.encode(batch)).square().mean()

    make_trainer(tmp_path, npu.Prefetch(), max_epochs=1000, max_steps=10_000).fit(Grows(frozen), loader())
    frozen.close()
    assert len(sizes) == 2
    assert sizes[1] - sizes[0] < 16 << 20


@pytest.mark.slow
def test_two_ranks_get_their_own_share(tmp_path: Path, compiled: npu.Artifact) -> None:
    module = npu.NPUFrozenModule(compiled.path)
    trainer = make_trainer(tmp_path, npu.Prefetch(2), max_epochs=1, devices=2, strategy="ddp_spawn")
    trainer.fit(Counts(module), loader(shuffle=False))
    shares = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [len(share) for share in shares] == [5, 5]
