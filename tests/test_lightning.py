"""A LightningModule with an offloaded encoder trains, saves and loads as Lightning users expect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import compile_encoder, make_encoder, make_images
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_npu as npu


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(make_images(24, seed=2), torch.randn(24, 2)), batch_size=4)


class Policy(pl.LightningModule):
    """An encoder that is frozen and a head that is trained."""

    def __init__(self, encoder: nn.Module, compiled: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 2)
        self.example_input_array = make_images(2)

    def forward(self, x: Tensor) -> Tensor:
        tokens, mean = self.encoder(x)
        return self.head(tokens.mean(1) + mean)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())
        self.log("loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def make_trainer(folder: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 4,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(default_root_dir=folder, **{**settings, **options})


@pytest.fixture
def policy(compiled: npu.Artifact) -> Iterator[Policy]:
    torch.manual_seed(0)
    frozen = npu.NPUFrozenModule(compiled.path)
    yield Policy(frozen)
    frozen.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_it_trains_in_every_precision(policy: Policy, tmp_path: Path, precision: Any) -> None:
    before = policy.head.weight.detach().clone()
    trainer = make_trainer(tmp_path, precision=precision, enable_model_summary=True)
    trainer.fit(policy, loader(), loader())
    assert trainer.global_step == 4
    assert not torch.equal(policy.head.weight.detach().float(), before)
    assert torch.isfinite(trainer.callback_metrics["loss"])
    assert policy.encoder.stats["samples"] >= 16


def test_a_checkpoint_keeps_a_fingerprint_and_loads_with_weights_only(policy: Policy, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(policy, loader())
    trainer.save_checkpoint(tmp_path / "policy.ckpt")
    content = torch.load(tmp_path / "policy.ckpt", weights_only=True)
    state = content["state_dict"]
    assert set(state) == {"head.weight", "head.bias", "encoder._extra_state"}
    assert state["encoder._extra_state"]["fingerprint"] == policy.encoder.fingerprint
    make_trainer(tmp_path, max_steps=6).fit(policy, loader(), ckpt_path=tmp_path / "policy.ckpt")


def test_a_checkpoint_of_another_artifact_is_refused_with_both_fingerprints(policy: Policy, tmp_path: Path) -> None:
    torch.save(policy.state_dict(), tmp_path / "state.pt")
    other = compile_encoder(tmp_path / "other.npu", seed=1, precision="fp32")
    stranger = Policy(npu.NPUFrozenModule(other))
    with pytest.raises(npu.ArtifactError, match="another artifact") as caught:
        stranger.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert policy.encoder.fingerprint in str(caught.value)
    assert other.fingerprint in str(caught.value)


def test_a_checkpoint_from_before_the_offload_loads_strictly(policy: Policy) -> None:
    before = Policy(make_encoder())
    nn.init.constant_(before.head.weight, 3.0)
    assert policy.load_state_dict(before.state_dict(), strict=True).missing_keys == []
    assert policy.head.weight.eq(3.0).all()


def test_original_weights_that_were_not_compiled_are_refused(policy: Policy) -> None:
    changed = Policy(make_encoder(seed=4))
    with pytest.raises(npu.ArtifactError, match=r"differ from those that were compiled(.|\n)*tensors differ"):
        policy.load_state_dict(changed.state_dict())
    state = Policy(make_encoder()).state_dict()
    state["encoder.foreign.weight"] = torch.zeros(1)
    with pytest.raises(npu.ArtifactError, match=r"not those of the module that was offloaded(.|\n)*foreign.weight"):
        policy.load_state_dict(state)


def test_a_checkpoint_that_says_nothing_is_accepted_with_a_warning(policy: Policy) -> None:
    state = {name: value for name, value in policy.state_dict().items() if not name.startswith("encoder")}
    with pytest.warns(UserWarning, match="says nothing about 'encoder'"):
        policy.load_state_dict(state, strict=True)


def test_weight_averaging_copies_the_model(policy: Policy, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, max_steps=-1, max_epochs=3, callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(policy, loader())
    assert trainer.current_epoch == 3


class FromPath(Policy):
    def __init__(self, artifact: str) -> None:
        super().__init__(npu.NPUFrozenModule(artifact))
        self.save_hyperparameters()


def test_load_from_checkpoint(compiled: npu.Artifact, tmp_path: Path) -> None:
    policy = FromPath(str(compiled.path))
    trainer = make_trainer(tmp_path)
    trainer.fit(policy, loader())
    trainer.save_checkpoint(tmp_path / "p.ckpt")
    loaded = FromPath.load_from_checkpoint(tmp_path / "p.ckpt", weights_only=True)
    x = make_images(2)
    assert torch.equal(loaded(x), policy(x))


class Lazy(Policy):
    """Offloads in ``setup``, as policies do that are built lazily; ``setup`` may be called once per stage."""

    def __init__(self, folder: Path) -> None:
        super().__init__(make_encoder())
        self.folder = folder

    def setup(self, stage: str) -> None:
        npu.offload(self, "encoder", calibration=loader(), output=self.folder / "lazy.npu", min_sqnr_db=None)


def test_offload_in_setup(tmp_path: Path) -> None:
    policy = Lazy(tmp_path)
    flags = [module.training for module in policy.head.modules()]
    trainer = make_trainer(tmp_path)
    trainer.fit(policy, loader())
    trainer.validate(policy, loader(), verbose=False)
    assert isinstance(policy.encoder, npu.NPUFrozenModule)
    assert [module.training for module in policy.head.modules()] == flags
    assert not any(name.startswith("encoder") for name, _ in policy.named_parameters())


class Configures(Policy):
    """Offloads in ``configure_model``, which ``load_from_checkpoint`` calls, too."""

    def __init__(self, folder: str) -> None:
        super().__init__(make_encoder())
        self.save_hyperparameters()
        self.folder = Path(folder)

    def configure_model(self) -> None:
        npu.offload(self, "encoder", calibration=loader(), output=self.folder / "m.npu", min_sqnr_db=None)


def test_offload_in_configure_model_works_with_load_from_checkpoint(tmp_path: Path) -> None:
    policy = Configures(str(tmp_path))
    trainer = make_trainer(tmp_path)
    trainer.fit(policy, loader())
    trainer.save_checkpoint(tmp_path / "p.ckpt")
    loaded = Configures.load_from_checkpoint(tmp_path / "p.ckpt", weights_only=True)
    x = make_images(2)
    assert torch.equal(loaded(x), policy(x))


class Offload(pl.Callback):
    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        npu.offload(
            pl_module, "encoder", calibration=loader(), output=self.folder / "c.npu", min_sqnr_db=None, **self.options
        )


def test_offload_from_a_callback_with_a_tail(tmp_path: Path) -> None:
    policy = Policy(make_encoder())
    trainer = make_trainer(tmp_path, callbacks=[Offload(tmp_path, cut="stem", precision="fp32")], precision="bf16-true")
    trainer.fit(policy, loader())
    assert isinstance(policy.encoder.tail, nn.Module)
    names = [name for name, _ in policy.encoder.tail.named_parameters()]
    assert any("layer.query" in name for name in names)
    assert not any("stem" in name for name in names)
    trainer.save_checkpoint(tmp_path / "t.ckpt")
    state = torch.load(tmp_path / "t.ckpt", weights_only=True)["state_dict"]
    assert set(state) == {"head.weight", "head.bias", "encoder._extra_state"}
    again = Policy(make_encoder())
    npu.offload(
        again,
        "encoder",
        calibration=loader(),
        cut="stem",
        output=tmp_path / "c.npu",
        precision="fp32",
        min_sqnr_db=None,
    )
    again.load_state_dict(state, strict=True)
    again.load_state_dict(Policy(make_encoder()).state_dict(), strict=True)
    with torch.no_grad():
        again.encoder.tail.get_submodule("layer").query.weight.add_(1)
    other = Policy(make_encoder())
    nn.init.zeros_(other.encoder.layer.query.weight)
    with pytest.raises(npu.ArtifactError, match=r"made from something else: weights"):
        npu.offload(other, "encoder", calibration=loader(), cut="stem", output=tmp_path / "c.npu", precision="fp32")


def test_a_changed_tail_is_noticed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibration": loader(), "cut": "stem", "precision": "fp32"}
    one, two = Policy(make_encoder()), Policy(make_encoder())
    nn.init.zeros_(two.encoder.layer.query.weight)
    npu.offload(one, "encoder", output=tmp_path / "one.npu", **options)
    npu.offload(two, "encoder", output=tmp_path / "two.npu", **options)
    assert one.encoder.fingerprint == two.encoder.fingerprint  # the heads are equal
    with pytest.raises(npu.ArtifactError, match="another tail behind the same artifact"):
        two.load_state_dict(one.state_dict())


def _features(encoder: Any) -> Any:
    return encoder(make_images(3, seed=11))


def test_offload_keeps_what_the_model_computes(tmp_path: Path) -> None:
    policy, original = Policy(make_encoder()), make_encoder()
    how = {"cut": "stem", "output": tmp_path / "o.npu", "precision": "fp32"}
    frozen = npu.offload(policy, "encoder", calibration=loader(), **how)
    assert policy.encoder is frozen
    assert npu.offload(policy, "encoder", calibration=loader(), **how) is frozen
    for a, b in zip(_features(original), _features(policy.encoder), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_two_spawned_ranks_train(compiled: npu.Artifact, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, devices=2, strategy="ddp_spawn")
    trainer.fit(Policy(npu.NPUFrozenModule(compiled.path)), loader())
    assert torch.isfinite(trainer.callback_metrics["loss"])  # brought back from rank 0
