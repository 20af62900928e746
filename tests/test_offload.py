"""One call compiles a submodule and swaps it; what it finds on disk is used again only if it is the same."""

from __future__ import annotations

import functools
import importlib
import logging
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import make_encoder, make_images
from torch import Tensor, nn

import lightning_npu as npu


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"encoder": make_encoder()})
        self.head = nn.Linear(8, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.vision["encoder"](batch["image"] - 0.5)[1])


def batches(count: int = 5) -> list[dict[str, Tensor]]:
    return [{"image": make_images(8, seed=i)} for i in range(count)]


def offload(model: nn.Module, output: Path | None, **options: Any) -> npu.NPUFrozenModule:
    options = {"calibration": batches(), "min_sqnr_db": None, **options}
    return npu.offload(model, "vision.encoder", output=output, **options)


def test_it_swaps_in_place_and_finds_the_inputs_by_itself(tmp_path: Path) -> None:
    model, original = Model().eval(), Model().eval()
    original.load_state_dict(model.state_dict())
    frozen = offload(model, tmp_path / "e.npu")
    assert model.vision["encoder"] is frozen
    artifact = npu.Artifact.load(tmp_path / "e.npu")
    assert artifact.inputs[0].name == "images"
    assert artifact.manifest["source"]["submodule"] == "vision.encoder"
    assert artifact.manifest["calibration"]["samples"] == 32
    batch = {"image": make_images(4, seed=50)}
    assert torch.allclose(model(batch), original(batch), atol=0.05)
    frozen.close()


def test_ready_inputs_work_too(tmp_path: Path) -> None:
    ready = [(batch["image"] - 0.5,) for batch in batches()]
    assert offload(Model(), tmp_path / "e.npu", calibration=ready).artifact is not None


def test_an_artifact_of_the_same_is_used_again(tmp_path: Path) -> None:
    first = offload(Model(), tmp_path / "e.npu")
    created = (tmp_path / "e.npu" / "manifest.json").stat().st_mtime_ns
    second = offload(Model(), tmp_path / "e.npu", recipe="faithful", calibration=batches(1))
    assert second.fingerprint == first.fingerprint
    assert (tmp_path / "e.npu" / "manifest.json").stat().st_mtime_ns == created
    changed = Model()
    nn.init.zeros_(changed.vision["encoder"].layer.query.weight)
    with pytest.raises(npu.ArtifactError, match=r"made from something else: weights differ(.|\n)*overwrite"):
        offload(changed, tmp_path / "e.npu")
    with pytest.raises(npu.ArtifactError, match="made from something else: precision differ"):
        offload(Model(), tmp_path / "e.npu", precision="fp32")
    replaced = offload(changed, tmp_path / "e.npu", overwrite=True)
    assert replaced.fingerprint != first.fingerprint


def test_a_second_call_that_asks_for_something_else_is_refused(tmp_path: Path) -> None:
    model = Model()
    frozen = offload(model, tmp_path / "e.npu")
    assert offload(model, tmp_path / "e.npu") is frozen
    assert offload(model, None) is frozen
    for options, named in (
        ({"cut": "stem"}, "cut"),
        ({"precision": "fp32"}, "precision"),
        ({"recipe": "fast"}, "recipe"),
        ({"keep_reference": True}, "keep_reference"),
        ({"on_failure": "reference"}, "keep_reference"),
        ({"gradient": "forward"}, "gradient"),
    ):
        with pytest.raises(npu.InputError, match=rf"offloaded already, in another way: {named}\.(.|\n)*new model"):
            offload(model, tmp_path / "e.npu", **options)
    with pytest.raises(npu.InputError, match=r"in another way: output(.|\n)*other\.npu"):
        offload(model, tmp_path / "other.npu")
    frozen.close()


def test_one_made_by_hand_is_told_from_one_of_something_else(tmp_path: Path) -> None:
    npu.compile_module(
        make_encoder(), (make_images(8),), calibration=[(make_images(8),)] * 5, output=tmp_path / "e.npu",
        precision="fp32", min_sqnr_db=None,
    )  # fmt: skip
    with pytest.raises(npu.ArtifactError, match=r"made by compile_module(.|\n)*NPUFrozenModule\(path, tail"):
        offload(Model(), tmp_path / "e.npu", precision="fp32")


def test_it_says_what_it_did_and_leaves_the_users_logging_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script; pytest has its own
    seen: list[str] = []
    monkeypatch.setattr(pl.utilities, "rank_zero_info", seen.append)
    offload(Model(), tmp_path / "e.npu")
    offload(Model(), tmp_path / "e.npu")
    assert re.match(
        r"vision\.encoder of Model now runs as .*e\.npu \(a8w8, compiled, lowest SQNR \d+\.\d dB\)", seen[0]
    )
    assert "used again" in seen[1]
    assert logging.getLogger().handlers == [], "or the user's logging.basicConfig() would do nothing"


def test_an_artifact_of_another_computation_is_not_used_again(tmp_path: Path) -> None:
    """Weights, class and options are the same; a stride, a hidden buffer and the code are not."""
    offload(Model(), tmp_path / "e.npu")
    strided = Model()
    strided.vision["encoder"].stem[0].dilation = (2, 2)
    strided.vision["encoder"].stem[0].padding = (2, 2)
    with pytest.raises(npu.ArtifactError, match="structure differ"):
        offload(strided, tmp_path / "e.npu")
    recoded = Model()
    encoder = recoded.vision["encoder"]
    forward = encoder.forward
    encoder.forward = lambda images, scale=1.0: forward(images * 2, scale)
    with pytest.raises(npu.ArtifactError, match=r"computes something else than the module(.|\n)*dB in output"):
        offload(recoded, tmp_path / "e.npu")
    loud = [{"image": batch["image"] * 50} for batch in batches()]
    with pytest.raises(npu.FidelityError, match=r"calibrated on other data(.|\n)*overwrite=True"):
        offload(Model(), tmp_path / "e.npu", calibration=loud, min_sqnr_db=15.0)


def test_the_loser_of_a_race_takes_the_winners_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lightning_npu.offloading")
    original = module.compile_module
    winner: list[npu.NPUFrozenModule] = []

    @functools.wraps(original)
    def slow(*args: Any, **options: Any) -> npu.Artifact:
        monkeypatch.setattr(module, "compile_module", original)
        winner.append(offload(Model(), tmp_path / "e.npu", calibration=batches()[::-1]))
        return original(*args, **options)

    monkeypatch.setattr(module, "compile_module", slow)
    loser = offload(Model(), tmp_path / "e.npu")
    assert loser.fingerprint == winner[0].fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["e.npu"]


def test_all_names_of_a_module_are_replaced(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = make_encoder()
            self.cameras = nn.ModuleList([self.encoder, self.encoder])

        def forward(self, images: Tensor) -> Tensor:
            return sum(camera(images)[1] for camera in self.cameras)

    model = Twice()
    images = [make_images(8, seed=i) for i in range(3)]
    frozen = npu.offload(model, "encoder", calibration=images, output=tmp_path / "e.npu", precision="fp32")
    assert model.cameras[0] is model.cameras[1] is frozen
    model(images[0])
    assert frozen.stats["calls"] == 2
    assert set(model.state_dict()) == {f"{name}._extra_state" for name in ("encoder", "cameras.0", "cameras.1")}


def test_without_an_output_each_module_gets_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    offload(Model(), None, precision="fp32")
    offload(Model(), None, precision="fp32", cut="stem")
    made = sorted(path.name for path in (tmp_path / "lightning_npu_artifacts").iterdir())
    assert len(made) == 2
    assert made[0].startswith("vision.encoder-")
    assert made[1].startswith("vision.encoder-stem-")


def test_a_wrong_name_lists_the_nearest() -> None:
    with pytest.raises(npu.InputError, match=r"no submodule 'vision.encodr'(.|\n)*vision.encoder"):
        npu.offload(Model(), "vision.encodr", calibration=batches())


def test_a_failure_leaves_the_model_and_the_disk_as_they_were(tmp_path: Path) -> None:
    model = Model().train()
    encoder = model.vision["encoder"]
    with pytest.raises(npu.FidelityError, match=r"SQNR|dB"):
        offload(model, tmp_path / "e.npu", min_sqnr_db=190.0)
    with pytest.raises(npu.InputError, match="empty"):
        offload(model, tmp_path / "e.npu", calibration=[])
    poisoned = [{"image": torch.full((8, 3, 16, 16), float("nan"))}]
    with pytest.raises(npu.InputError, match="NaN"):
        offload(model, tmp_path / "e.npu", calibration=poisoned)
    assert model.vision["encoder"] is encoder
    assert encoder.training
    assert list(tmp_path.iterdir()) == []


def test_the_whole_model_keeps_its_device_and_flags(tmp_path: Path) -> None:
    model = Model().train()
    frozen = offload(model, tmp_path / "e.npu", precision="fp32")
    assert model.training
    assert model.head.training
    assert not frozen.training
    assert frozen.device == torch.device("cpu")
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
