"""Forward gradients in Lightning, Fabric and plain loops, with one process and two."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from forward_gradient_models import Mixed, Plain, loader, trainer
from lightning.fabric import Fabric
from torch import nn

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient import FixedPoint, ForwardGradient, ForwardGradientMixin
from lightning_npu.hashing import state_digest


def test_an_ordinary_training_step_trains(tmp_path: Path) -> None:
    model = Mixed(record=str(tmp_path / "facts"))
    first = trainer(tmp_path, max_epochs=1)
    first.fit(model, loader())
    start = float(first.callback_metrics["train_loss_ff"])
    longer = trainer(tmp_path, max_epochs=8)
    longer.fit(model, loader())
    facts = json.loads((tmp_path / "facts.0").read_text())
    assert float(longer.callback_metrics["train_loss_ff"]) < 0.8 * start
    assert (facts["steps"], facts["calls"]) == (64, 64 * 6)
    assert facts["graphs"] == [False]
    assert not facts["grads"]
    assert facts["lr"] == pytest.approx(0.02 * 0.9**8)


def test_logs_are_logged_once_per_batch(tmp_path: Path) -> None:
    model = Mixed()
    trainer(tmp_path, max_epochs=1).fit(model, loader())
    assert model.logged == ["train", "again", "train_loss_ff"] * 8
    hybrid = Mixed(hybrid=True)
    trainer(tmp_path, max_epochs=1).fit(hybrid, loader())
    assert hybrid.logged == ["train", "again", "train_loss_ff"] * 8


def test_hybrid_builds_a_graph_in_one_call_of_seven(tmp_path: Path) -> None:
    model = Mixed(hybrid=True)
    before = state_digest(model.head), state_digest(model.body)
    trainer(tmp_path, max_epochs=1).fit(model, loader())
    assert model.graphs == ([False] * 6 + [True]) * 8
    assert (state_digest(model.head) != before[0], state_digest(model.body) != before[1]) == (True, True)


@pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"fixed": True}], ids=["pure", "hybrid", "fixed"])
def test_a_resumed_run_is_the_uninterrupted_one(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Mixed(**options)
    trainer(tmp_path, max_epochs=4).fit(whole, loader())
    first = trainer(tmp_path, max_epochs=2)
    first.fit(Mixed(**options), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(77)
    resumed = Mixed(**options)
    trainer(tmp_path, max_epochs=4).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert state_digest(resumed) == state_digest(whole)


def test_without_the_mixin_it_trains_too_and_is_told_what_it_wastes(tmp_path: Path) -> None:
    model = Plain()
    with pytest.warns(UserWarning, match="derive from ForwardGradientMixin"):
        trainer(tmp_path, max_epochs=1).fit(model, loader())
    assert model.graphs == [True] * 48


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        def closure() -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
            self.graphs.append(loss.requires_grad)
            return loss

        self.log("train", self.optimizers().step(closure=closure), on_epoch=True)


def test_manual_optimisation_needs_no_mixin(tmp_path: Path) -> None:
    model = Manual()
    runner = trainer(tmp_path)
    runner.fit(model, loader())
    assert model.graphs == [False] * 6 * 24
    assert float(runner.callback_metrics["train_epoch"]) < 0.8


def test_copies_and_pickles_are_tied_to_nothing(tmp_path: Path) -> None:
    model = Mixed()
    trainer(tmp_path, max_epochs=1).fit(model, loader())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        trainer(tmp_path, max_epochs=1).fit(other, loader())
        assert other.graphs[-1] is False
        assert state_digest(other) != state_digest(model)


class WithBatchNorm(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.BatchNorm1d(16))


class WithManual(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithAdam(Mixed):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Silent(WithAdam):
    """Overrides the hooks that check early, without calling them."""

    def setup(self, stage: str) -> None:
        pass

    def on_fit_start(self) -> None:
        pass


class SilentMixed(Mixed):
    """Hooks that do not call those of the mixin."""

    setup, on_fit_start = Silent.setup, Silent.on_fit_start


class Frozen(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def test_ddp_without_a_parameter_that_requires_grad_is_refused_before_torch_does(tmp_path: Path) -> None:
    for module in (Frozen(), Mixed()):
        module.trainer = trainer(tmp_path, strategy="ddp", devices=2)  # type: ignore[assignment]
        if isinstance(module, Frozen):
            with pytest.raises(InputError, match=r"forward gradients need none(.|\n)*4 parameters(.|\n)*self.unused ="):
                module.setup("fit")
        else:
            module.setup("fit")
    trainer(tmp_path, max_epochs=1).fit(Frozen(), loader())


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (SilentMixed, {"gradient_clip_val": 1.0}, "cannot clip"),
        (SilentMixed, {"accumulate_grad_batches": 2}, "not accumulated"),
        (Mixed, {"gradient_clip_val": 1.0}, r"cannot clip(.|\n)*bound every step"),
        (Mixed, {"accumulate_grad_batches": 2}, r"not accumulated(.|\n)*larger batches"),
        (WithBatchNorm, {}, r"BatchNorm1d in train mode(.|\n)*m.eval\(\)"),
        (WithManual, {}, r"automatic optimisation(.|\n)*leave the mixin out"),
        (WithAdam, {}, r"needs one optimizer(.|\n)*Adam"),
        (Silent, {}, r"needs one optimizer(.|\n)*Adam"),
    ],
)
def test_what_cannot_be_right_is_refused(
    module: type[Mixed], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        trainer(tmp_path, **options).fit(module(), loader())


def test_half_precision_with_loss_scaling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = trainer(tmp_path)  # Lightning refuses 16-mixed on processors before the module is asked
    monkeypatch.setattr(runner.strategy.precision_plugin, "precision", "16-mixed")
    with pytest.raises(InputError, match=r"loss scaling expects gradients(.|\n)*bf16-mixed"):
        runner.fit(Mixed(), loader())


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions_train(precision: Any, tmp_path: Path) -> None:
    model = Mixed()
    before = state_digest(model)
    runner = trainer(tmp_path, max_epochs=1, precision=precision)
    runner.fit(model, loader(dtype=torch.float64 if precision == "64-true" else torch.float32))
    assert state_digest(model) != before
    assert torch.isfinite(runner.callback_metrics["train_loss_ff"])


class Watcher(pl.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


def test_callbacks_that_look_at_gradients_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Watcher.*several times per batch"):
        trainer(tmp_path, max_epochs=1, callbacks=[Watcher()]).fit(Mixed(), loader())


def test_outside_of_training_the_mixin_changes_nothing() -> None:
    class Bare(ForwardGradientMixin, pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

    assert Bare().training_step(torch.ones(1, 2)).requires_grad


def test_fabric() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    model, optimizer = fabric.setup(net, ForwardGradient(net.parameters(), 0.02, eps=1e-2, estimator="normalized"))
    losses = []
    for _ in range(6):
        for x, y in fabric.setup_dataloaders(loader()):
            loss = optimizer.step(closure=lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))
            losses.append(float(loss))
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert all(p.grad is None for p in net.parameters())


# ---- two processes


def test_two_ranks_of_lightning_hold_equal_weights_after_100_steps(tmp_path: Path) -> None:
    record = str(tmp_path / "facts")
    runner = trainer(tmp_path, devices=2, strategy="ddp_spawn", max_steps=100, max_epochs=-1)
    runner.fit(Mixed(record=record, hybrid=True), loader())
    first, second = (json.loads(Path(f"{record}.{rank}").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"] == 100
    assert first["calls"] == second["calls"] == 700
    assert first["graphs"] == [False, True]
    assert not first["grads"]
    assert first["loss"] < 0.6


RULES: dict[str, dict[str, Any]] = {
    "average": {},
    "directions": {"ddp": "directions", "m": 2},
    "fixed": {"fixed_point": FixedPoint(8, rounding="error_feedback"), "sam_rho": 0.01},
    "stochastic": {"fixed_point": FixedPoint(8, rounding="stochastic"), "ddp": "directions"},
    "sam": {"sam_rho": 0.01, "ddp": "directions", "momentum": 0.5},
}


def _trained(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = ForwardGradient(net.parameters(), 0.02, eps=1e-2, **options)
    batches = list(loader())[rank::2] * 25
    losses = [float(optimizer.step(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))) for x, y in batches]
    return {"weights": state_digest(net), "losses": losses, "calls": optimizer.calls}


def _rank(rank: int, folder: str) -> None:
    """Plain loops over this rank's half of the data, one for each set of options."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    facts: dict[str, Any] = {name: _trained(rank, options) for name, options in RULES.items()}
    parameter = nn.Parameter(torch.ones(2))
    try:
        ForwardGradient([parameter], 0.02, seed=rank).step(lambda: parameter.sum())
    except InputError as error:
        facts["refused"] = str(error)
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    hybrid = ForwardGradient(body.parameters(), 0.02, first_order=torch.optim.SGD(head.parameters(), 0.1))

    def closure() -> torch.Tensor:  # one rank's last call goes wrong, and all must leave the step out
        loss = head(body(torch.ones(1, 2))).double().sum()
        return loss * float("nan") if rank and loss.requires_grad else loss

    hybrid.step(closure)
    facts["skipped"] = hybrid.skipped
    Path(folder, f"rank{rank}").write_text(json.dumps(facts))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_of_plain_loops_hold_equal_weights_after_100_steps(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1))
    assert first == second  # weights by their hash, and the losses, which both know
    for name in RULES:
        assert sum(first[name]["losses"][-10:]) < sum(first[name]["losses"][:10])
    assert {name: first[name]["calls"] for name in RULES} == {
        "average": 600,
        "directions": 400,
        "fixed": 800,
        "stochastic": 600,
        "sam": 800,
    }
    assert "seeds 0 to 1" in first["refused"]
    assert first["skipped"] == 1


class Waiting(Mixed):
    """Hybrid, but the trained parameters still require grad when DDP wraps the model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.body.requires_grad_(True)


@pytest.mark.slow
def test_hybrids_that_ddp_would_wait_for_are_refused(tmp_path: Path) -> None:
    runner = trainer(tmp_path, devices=2, strategy="ddp_spawn", max_steps=2)
    with pytest.raises(Exception, match="DDP would wait for gradients"):  # torch wraps what a spawned process raises
        runner.fit(Waiting(hybrid=True), loader())
