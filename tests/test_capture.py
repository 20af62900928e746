"""capture_inputs: what a submodule is fed while its model runs, and that the model is left as it was."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_npu.compile.capture import capture_inputs
from lightning_npu.errors import CompileError, InputError


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Cameras(nn.Module):
    """Calls its encoder by keyword, once per camera."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, image: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
            return self.linear(image) * scale

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.Encoder()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum(self.encoder(image=batch[name], scale=2.0, mask=None) for name in ("left", "right"))


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()
        self.steps = 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        prediction = self.policy(x)
        loss = nn.functional.mse_loss(prediction, y)
        self.log("loss", loss)
        self.log_dict({"a": loss})
        self.mean += prediction.mean(0)
        self.steps += 1
        self.seen.append(batch_idx)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 4), torch.randn(count, 2)), batch_size=batch_size)


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "flags": [module.training for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "keys": [sorted(vars(module)) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
    }


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert all(torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"])
    assert torch.equal(a["torch"], b["torch"])
    assert {k: v for k, v in a.items() if k not in ("tensors", "torch")} == {
        k: v for k, v in b.items() if k not in ("tensors", "torch")
    }


def test_plain_model_in_mixed_modes_is_left_as_it_was() -> None:
    model = Policy().train()
    model.encoder[1].eval()
    batches = [torch.randn(2, 4) for _ in range(5)]
    before = state(model)

    captured = capture_inputs(model, "encoder", batches, limit_batches=3)

    assert_same_state(before, state(model))
    assert captured.batches == 3
    assert all(torch.equal(call.args[0], batch) for call, batch in zip(captured.calls, batches, strict=False))


def test_several_calls_per_batch_by_keyword() -> None:
    batch = {"left": torch.randn(2, 4), "right": torch.randn(2, 4)}
    captured = capture_inputs(Cameras(), "encoder", [batch, batch], limit_batches=10)
    assert (captured.batches, len(captured.calls)) == (2, 4)
    assert captured.calls[0].args == ()
    assert captured.calls[0].kwargs["scale"] == 2.0
    assert captured.calls[0].kwargs["mask"] is None
    assert torch.equal(captured.calls[1].kwargs["image"], batch["right"])


def test_what_is_recorded_is_a_copy() -> None:
    batch = torch.randn(2, 4)
    captured = capture_inputs(Policy(), "encoder", [batch], limit_batches=1)
    kept = captured.calls[0].args[0].clone()
    batch.zero_()
    assert torch.equal(captured.calls[0].args[0], kept)


@pytest.mark.parametrize("form", ["tuple", "dict", "with_labels"])
def test_batches_are_given_as_the_signature_wants(form: str) -> None:
    class Two(Policy):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    batch: Any = {"tuple": (x, y), "dict": {"y": y, "x": x}, "with_labels": [x, torch.zeros(2)]}[form]
    model = Policy() if form == "with_labels" else Two()
    captured = capture_inputs(model, "encoder", [batch], limit_batches=1)
    assert len(captured.calls) == 1
    assert torch.equal(captured.calls[0].args[0], x if form == "with_labels" else x + y)


def test_lightning_module_without_trainer() -> None:
    model, data = Learner(), loader()
    before = state(model)
    captured = capture_inputs(model, "policy.encoder", data, limit_batches=3)
    assert_same_state(before, state(model))
    assert captured.batches == len(captured.calls) == 3
    assert (model.steps, model.seen) == (0, [])
    assert "log" not in vars(model)


def test_batches_go_through_the_modules_own_transfer_hooks() -> None:
    class Doubling(Learner):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, batch[1]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 1, batch[1]

    data = loader()
    captured = capture_inputs(Doubling(), "policy.encoder", data, limit_batches=1)
    assert torch.equal(captured.calls[0].args[0], next(iter(data))[0] * 2 + 1)


@pytest.mark.parametrize("where", ["module", "callback"])
def test_inside_setup_of_a_real_trainer(tmp_path: Any, where: str) -> None:
    found: list[Any] = []

    class Module(Learner):
        def setup(self, stage: str) -> None:
            if where == "module":
                found.append(capture_inputs(self, "policy.encoder", loader(), limit_batches=2))

    class Capture(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            found.append(capture_inputs(pl_module, "policy.encoder", loader(), limit_batches=2))

    model = Module()
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Capture()] if where == "callback" else [],
    )
    trainer.fit(model, loader())
    assert len(found[0].calls) == 2
    assert model.steps == 2  # training itself ran as ever
    assert "loss" in trainer.callback_metrics


def test_manual_optimization_moves_no_weight() -> None:
    class Manual(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any) -> None:
            first, _ = self.optimizers()
            first.zero_grad()
            loss = self.policy(batch[0]).sum()
            self.manual_backward(loss)
            first.step()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(1.0)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]

    model, data = Manual(), loader()
    before = state(model)
    captured = capture_inputs(model, "policy.encoder", data, limit_batches=2)
    assert len(captured.calls) == 2
    assert_same_state(before, state(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_after_the_submodule_are_let_pass_and_before_it_are_not() -> None:
    class NeedsTrainer(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * self.trainer.max_steps

    assert len(capture_inputs(NeedsTrainer(), "policy.encoder", loader(), limit_batches=2).calls) == 2

    batches = [torch.randn(2, 4), torch.randn(2, 5)]

    class Strict(Policy):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 4:
                raise ValueError("four joints only")
            return super().forward(x)

    with pytest.raises(InputError, match=r"failed on batch 1 .* before it called 'encoder'[\s\S]*four joints only"):
        capture_inputs(Strict(), "encoder", batches, limit_batches=2)


def test_ready_inputs_of_the_submodule() -> None:
    class Step(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.policy(batch["x"]).sum()

    items = [torch.randn(2, 4) for _ in range(3)]
    captured = capture_inputs(Step(), "policy.encoder", iter(items), limit_batches=5)
    assert captured.batches == 3
    assert all(torch.equal(call.args[0], item) for call, item in zip(captured.calls, items, strict=True))

    keywords = [{"image": torch.randn(2, 4), "scale": 3.0}]
    captured = capture_inputs(Cameras(), "encoder", keywords, limit_batches=5)
    assert captured.calls[0].kwargs["scale"] == 3.0


def test_neither_batch_nor_ready_input_says_both_reasons() -> None:
    class Step(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.policy(batch["x"]).sum()

    with pytest.raises(InputError, match=r"Neither Step nor its submodule 'policy.encoder' runs") as caught:
        capture_inputs(Step(), "policy.encoder", [{"images": torch.randn(2, 7)}], limit_batches=1)
    assert "KeyError" in str(caught.value)
    assert "the submodule:" in str(caught.value)
    assert "run=lambda" in str(caught.value)


def test_run_is_used_as_given() -> None:
    model = Policy()
    captured = capture_inputs(
        model, "encoder", [{"pixels": torch.ones(2, 4)}], limit_batches=1, run=lambda m, b: m(b["pixels"] * 3)
    )
    assert torch.equal(captured.calls[0].args[0], torch.full((2, 4), 3.0))


def test_endless_and_one_shot_loaders() -> None:
    endless = (torch.full((2, 4), float(i)) for i in itertools.count())
    captured = capture_inputs(Policy(), "encoder", endless, limit_batches=3)
    assert [call.args[0][0, 0].item() for call in captured.calls] == [0.0, 1.0, 2.0]
    assert next(endless)[0, 0].item() == 3.0  # nothing was read ahead


def test_state_is_restored_after_an_error() -> None:
    class Failing(Policy):
        def forward(self, x: Tensor) -> Tensor:
            self.note = "left behind"
            self.encoder[1].running_mean.add_(1.0)
            torch.rand(3), np.random.rand(), random.random()
            raise ValueError("no")

    model = Failing().train()
    before = state(model)
    with pytest.raises(InputError):
        capture_inputs(model, "encoder", [{"a": 1}], limit_batches=1)
    assert_same_state(before, state(model))


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ("empty", "encoder", r"calibration loader is empty"),
        ("wrong", "encodr", r"no submodule 'encodr'[\s\S]*nearest are \['encoder'"),
        ("none", "encoder", r"'encoder' of Policy is not built yet: 'encoder' is None"),
        ("unused", "spare", r"'spare' was never called while Policy ran on 1 batches"),
        ("nan", "encoder", r"Input 'input' of 'encoder' holds 2 NaN or infinite values of 8 in batch 1 "),
        ("tensor", "encoder", r"loader is a single item[\s\S]*Got: Tensor"),
        ("limit", "encoder", r"limit_batches is too small"),
    ],
)
def test_messages(change: str, name: str, message: str) -> None:
    model = Policy()
    batches: Any = [torch.randn(2, 4)]
    if change == "empty":
        batches = []
    if change == "none":
        model.encoder = None
    if change == "unused":
        model.spare = nn.Linear(1, 1)
    if change == "nan":
        batches = [torch.randn(2, 4), torch.tensor([[1.0, float("nan"), 0, 0], [0, 0, 0, float("inf")]])]
    if change == "tensor":
        batches = batches[0]
    with pytest.raises(InputError, match=message):
        capture_inputs(model, name, batches, limit_batches=0 if change == "limit" else 4)
    assert model.training


def test_recording_stops_at_the_batch_that_holds_enough_samples() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    captured = capture_inputs(model, "0", (torch.zeros(4, 2) for _ in range(9)), limit_batches=9, limit_samples=10)
    assert captured.batches == 3
    assert sum(call.args[0].shape[0] for call in captured.calls) == 12


def test_everything_that_a_step_changes_comes_back() -> None:
    class Meter:
        def __init__(self) -> None:
            self.total, self.history = 0, [1]

    class Momentum(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(3, 2)
            self.hidden = [nn.Linear(3, 2)]  # in a list, so that it is not registered
            self.queue: deque[int] = deque([5], maxlen=2)
            self.table: dict[str, Any] = {"first": torch.zeros(2)}
            self.meter = Meter()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                for target in (self.target, self.hidden[0]):
                    for parameter in target.parameters():
                        parameter.mul_(0.5).add_(0.5)
            self.policy.head.weight.data = torch.zeros(2, 3)
            self.policy.head.weight.requires_grad_(False)
            self.queue.extend([6, 7])
            self.table["first"].add_(1)
            self.table["second"] = 2
            self.meter.total += 1
            self.meter.history.append(2)
            return super().training_step(batch, batch_idx)

    model, data = Momentum(), loader()
    before = state(model)
    hidden = model.hidden[0].weight.clone()
    order = [id(parameter) for parameter in model.parameters()]
    capture_inputs(model, "policy.encoder", data, limit_batches=2)
    assert_same_state(before, state(model))
    assert order == [id(parameter) for parameter in model.parameters()]
    assert model.policy.head.weight.requires_grad
    assert torch.equal(model.hidden[0].weight, hidden)
    assert list(model.queue) == [5]
    assert list(model.table) == ["first"]
    assert model.table["first"].tolist() == [0, 0]
    assert (model.meter.total, model.meter.history) == (0, [1])


def test_manual_optimization_warns_that_one_call_is_seen() -> None:
    class TwoCameras(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any) -> None:
            self.policy(batch[0])
            self.policy(batch[0] * 30)

    with pytest.warns(UserWarning, match=r"only the first call of 'policy.encoder'.*pass run=lambda model, batch"):
        captured = capture_inputs(TwoCameras(), "policy.encoder", loader(), limit_batches=2)
    assert len(captured.calls) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = capture_inputs(
            TwoCameras(),
            "policy.encoder",
            loader(),
            limit_batches=2,
            run=lambda m, batch: m.training_step(batch),
        )
    assert len(captured.calls) == 4


def test_masks_of_zero_and_minus_infinity_are_recorded() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))

    captured = capture_inputs(Masked(), "encoder", [torch.randn(2, 5, 8)], limit_batches=1)
    assert captured.calls[0].kwargs["src_mask"].isinf().sum() == 10


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: model.encoder.bfloat16(), r"'encoder' is in half precision(.|\n)*offload in FP32 first"),
        (lambda model: None, r"'encoder' was built or loaded under torch.inference_mode"),
    ],
)
def test_modules_that_cannot_be_compiled_are_refused_at_once(spoil: Any, message: str) -> None:
    with torch.inference_mode(spoil(Policy()) is None):
        model = Policy()
    spoil(model)
    with pytest.raises(CompileError, match=message):
        capture_inputs(model, "encoder", [torch.randn(2, 4)], limit_batches=1)
