"""From a module to an artifact for the board: kit, compiler, finish, and the fidelity that is measured on the board."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from act_encoder import act_front
from conftest import make_encoder, make_images
from fake_compiler.board import ROOT, put_on, read_mxq
from mobilint_parts import plug_in
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.compile import mobilint_script
from lightning_npu.compile.mobilint_compiler import installed_compiler
from lightning_npu.compile.mobilint_finish import UNMEASURED, finish
from lightning_npu.compile.mobilint_options import MobilintOptions, bits_for, precision_of
from lightning_npu.compile.samples import Samples
from lightning_npu.errors import ArtifactError, CompileError, CompilerMissingError, InputError, RuntimeUnavailableError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fake compiler is installed, for this process and those that it starts."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "qbcompiler"]:
        del sys.modules[name]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "dev").mkdir()
    made = plug_in("fake", monkeypatch, tmp_path / "dev")
    yield made
    made.released.set()


def write_kit(output: Path, module: nn.Module | None = None, **options: Any) -> Path:
    """The kit of ``module``; there is no compiler, so that is what comes of it."""
    batches = options.pop("batches", None) or list(make_images(40).split(8))
    first = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    options = {"min_sqnr_db": None, **options}
    with pytest.raises(CompilerMissingError) as caught:
        npu.compile_module(
            module or make_encoder(), first, calibration=batches, output=output, target="mobilint", **options
        )
    kit = output.with_suffix(".kit")
    assert str(kit) in caught.value.what
    assert f"--finish {kit / 'model.mxq'} -o {output}" in str(caught.value.remedy)
    assert not output.exists()
    return kit


def run_kit(kit: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As in the vendor's container: nothing of ours is on the path."""
    return subprocess.run(
        [sys.executable, "-I", "-c", _ISOLATED, str(ROOT), str(kit / "compile.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=kit,
        env={**os.environ, **environment},
    )


_ISOLATED = """
import runpy, sys
root, script = sys.argv[1:3]
sys.path.insert(0, root)
sys.modules["lightning_npu"] = sys.modules["torch"] = None  # what a container does not have
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def kit_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kit(tmp_path_factory.mktemp("kits") / "encoder.npu")


@pytest.fixture
def kit(kit_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kit_once, tmp_path / "encoder.kit"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- what is in a kit


def test_a_kit_holds_all_that_the_compiler_needs_and_says_how_to_go_on(kit: Path) -> None:
    assert sorted(path.name for path in kit.iterdir()) == [
        "README.md", "calibration", "compile.py", "judging.npz", "kit.json", "model.onnx", "onnx.npu",
    ]  # fmt: skip
    content = json.loads((kit / "kit.json").read_text())
    assert content["head"]["inputs"] == [{"name": "images", "layout": "HWC", "dtype": "float32", "shape": [16, 16, 3]}]
    assert [entry["shape"] for entry in content["head"]["outputs"]] == [[1, 16, 8], [1, 1, 8]]
    assert content["compile"]["core_mode"] == "single"
    assert set(content["compile"]["bits"]["activation"].values()) == {8}
    assert content["model"]["attentions"] == 1
    assert max(content["model"]["max_abs_error"].values()) < 1e-5
    readme = (kit / "README.md").read_text()
    assert "docker run --rm" in readme
    assert re.search(r"mobilint/qbcompiler:1\.\d-cpu-ubuntu22\.04", readme)
    assert "lightning-npu compile --finish model.mxq -o encoder.npu" in readme
    assert "| images | float32 | [16, 16, 3] |" in readme


def test_calibration_files_are_samples_in_height_width_channels_in_order(kit: Path) -> None:
    content = json.loads((kit / "kit.json").read_text())
    images = make_images(40)
    listed = content["calibration"]["samples"]
    assert len(listed) == content["calibration"]["count"] == 32
    assert sorted(path.name for path in (kit / "calibration").iterdir()) == [f"{index:04d}.npy" for index in range(32)]
    for index, [entry] in enumerate(listed):
        assert entry["file"] == f"calibration/{index:04d}.npy"
        assert entry["sha256"] == sha256(kit / entry["file"])
        array = np.load(kit / entry["file"], allow_pickle=False)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, images[index].permute(1, 2, 0).numpy())
    artifact = npu.Artifact.load(kit / "onnx.npu")
    assert content["calibration"]["sha256"] == artifact.manifest["calibration"]["sha256"]
    assert content["calibration"]["sha256"] == Samples(artifact.inputs, (images[:32],), 32).sha256()
    with np.load(kit / "judging.npz", allow_pickle=False) as judging:
        np.testing.assert_array_equal(judging["images"], images[32:].numpy())


def test_the_onnx_artifact_in_the_kit_trains_meanwhile(kit: Path) -> None:
    module = npu.NPUFrozenModule(kit / "onnx.npu")
    tokens, _ = module(make_images(3))
    assert tokens.shape == (3, 16, 8)
    module.close()


def test_several_inputs_are_listed_together(tmp_path: Path) -> None:
    torch.manual_seed(1)
    batches = [(torch.rand(8, 3, 32, 32), torch.randn(8, 8), torch.randn(8, 6)) for _ in range(3)]
    kit = write_kit(tmp_path / "act.npu", act_front(), batches=batches)
    content = json.loads((kit / "kit.json").read_text())
    names = ["images", "latent", "state"]
    assert [entry["file"] for entry in content["calibration"]["samples"][3]] == [
        f"calibration/0003/{name}.npy" for name in names
    ]
    shapes = [np.load(kit / f"calibration/0003/{name}.npy", allow_pickle=False).shape for name in names]
    assert shapes == [(32, 32, 3), (1, 1, 8), (1, 1, 6)]
    done = run_kit(kit)
    assert done.returncode == 0, done.stderr
    assert read_mxq(kit / "model.mxq")["samples"] == content["calibration"]["count"]
    assert content["head"]["outputs"][0]["shape"] == [1, 18, 32]


class TakesFrames(nn.Module):
    """An encoder that is given raw frames."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_encoder()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6])[:, None, None])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder((images.float() / 255 - self.mean) / 0.25)


def frames(count: int, seed: int = 1) -> Tensor:
    return (make_images(count, seed) * 255).round().to(torch.uint8)


@pytest.mark.parametrize("stated", [False, True])
def test_raw_frames_are_calibrated_raw_and_normalised_by_the_compiler(stated: bool, tmp_path: Path, board: Any) -> None:
    options: dict[str, Any] = {"batches": list(frames(40).split(8))}
    if stated:
        normalize = {"mean": [0.4, 0.5, 0.6], "std": [0.25, 0.25, 0.25]}
        kit = write_kit(tmp_path / "e.npu", make_encoder(), target_options={"normalize": normalize}, **options)
    else:
        kit = write_kit(tmp_path / "e.npu", TakesFrames().eval(), **options)
    array = np.load(kit / "calibration/0000.npy", allow_pickle=False)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, frames(40)[0].permute(1, 2, 0).numpy())
    assert run_kit(kit).returncode == 0
    told = read_mxq(kit / "model.mxq")
    assert told["uint8"] == ["images"]
    assert told["image_channels"] == 3
    [step] = told["pipeline"]
    assert (step["op"], step["scaleToUint8"], step["fuseIntoFirstLayer"]) == ("normalize", True, True)
    np.testing.assert_allclose(step["mean"], [0.4, 0.5, 0.6], rtol=1e-5)
    np.testing.assert_allclose(step["std"], [0.25, 0.25, 0.25], rtol=1e-5)
    put_on(board, kit / "model.mxq")
    artifact = finish(kit / "model.mxq", tmp_path / "e.npu")
    assert artifact.inputs[0].dtype == "uint8"
    assert artifact.manifest["mobilint"]["inputs"] == [{"layout": "HWC", "dtype": "uint8", "shape": [16, 16, 3]}]
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    with torch.no_grad():
        right = TakesFrames().eval()(frames(5, 9))
    torch.testing.assert_close(module(frames(5, 9)), right, rtol=1e-4, atol=1e-4)
    assert {array.dtype.name for array in board.seen} <= {"uint8"}
    module.close()


# ---- the script


def test_the_script_passes_what_the_kit_says_and_records_it(kit: Path) -> None:
    done = run_kit(kit)
    assert done.returncode == 0, done.stderr
    assert "lightning-npu compile --finish" in done.stdout
    told = read_mxq(kit / "model.mxq")
    assert told["onnx_sha256"] == sha256(kit / "model.onnx")
    assert (told["scheme"], told["target_device"], told["device"]) == ("single", "aries-rb", "cpu")
    assert set(told["bits"]["activation"].values()) == set(told["bits"]["weight"].values()) == {8}
    assert told["calibration"]["mode"] == 1
    assert told["samples"] == 32
    assert told["dropped"] == []
    assert told["pipeline"] is None
    record = json.loads((kit / "model.mxq.json").read_text())
    assert record["compiler"] == {
        "name": "qbcompiler",
        "version": "1.3.0",
        "target_device": "aries-rb",
        "device": "cpu",
    }
    assert record["mxq_sha256"] == sha256(kit / "model.mxq")
    assert record["kit_sha256"] == json.loads((kit / "kit.json").read_text())["kit_sha256"]
    assert json.loads(record["used_config"]) == {"inferenceScheme": "single"}
    assert not [path for path in kit.iterdir() if path.name.startswith(".")]


def test_the_chip_is_called_as_the_compilers_version_calls_it(kit: Path) -> None:
    assert run_kit(kit, FAKE_QBCOMPILER_VERSION="v1.1.2+aries2").returncode == 0
    assert read_mxq(kit / "model.mxq")["target_device"] == "aries2"
    names = [
        mobilint_script.target_device("qbcompiler", version) for version in ("1.1.2+aries2", "1.2.0", "1.4", "dev")
    ]
    assert names == ["aries2", "aries-rb", "aries-rb", "aries-rb"]
    assert mobilint_script.target_device("qubee", "0.11") == "aries"


def test_scores_of_16_bits_are_found_by_their_place_before_the_softmax(tmp_path: Path) -> None:
    kit = write_kit(tmp_path / "e.npu", target_options={"score_bits": 16, "core_mode": "all"})
    done = run_kit(kit)
    assert done.returncode == 0, done.stderr
    told = read_mxq(kit / "model.mxq")
    [name] = told["bits"]["activation_16bits"]
    node = onnx.load(kit / "model.onnx").graph.node[int(name.removeprefix("matmul_"))]
    assert node.name == json.loads((kit / "kit.json").read_text())["model"]["score_products"][0]
    assert told["scheme"] == "all"
    assert run_kit(kit, "--score-layers", "a,b").returncode == 1
    assert run_kit(kit, "--score-layers", "mine").returncode == 0
    assert json.loads((kit / "model.mxq.json").read_text())["bits"]["score_layers"] == ["mine"]


@pytest.mark.parametrize("name", ["model.onnx", "calibration/0007.npy"])
def test_a_damaged_kit_is_not_compiled(name: str, kit: Path) -> None:
    with (kit / name).open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\xff")
    done = run_kit(kit)
    assert done.returncode == 1
    assert f"Error: {name} was changed or damaged" in done.stderr
    (kit / name).unlink()
    assert f"Error: {name} is missing from the kit" in run_kit(kit).stderr
    assert not (kit / "model.mxq").exists()


def test_a_compiler_that_would_drop_what_matters_is_not_called(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mxq_compile(model: str, calib_data_path: str, save_path: str, **kwargs: object) -> None:
        raise AssertionError

    with pytest.raises(mobilint_script.KitError, match="does not take target_device, bit_config, and would silently"):
        mobilint_script._accepted(
            mxq_compile, {}, ["model", "save_path", "target_device", "bit_config"], "qbcompiler 0.9"
        )
    arguments = {"model": 1, "calib_data_path": 2, "save_path": 3, "config_save_path": 4}
    assert mobilint_script._accepted(mxq_compile, arguments, ["model"], "x") == {
        "model": 1, "calib_data_path": 2, "save_path": 3,
    }  # fmt: skip


def test_the_arguments_that_matter_are_in_the_documented_signature(compiler: None) -> None:
    import qbcompiler

    known = set(inspect.signature(qbcompiler.mxq_compile).parameters)
    assert {
        "model", "target_device", "calib_data_path", "save_path", "backend", "device", "inference_scheme",
        "config_save_path", "calibration_config", "bit_config", "uint8_input_config", "preprocessing_config",
        "image_channels",
    } <= known  # fmt: skip


def test_the_predecessor_takes_heads_without_attention_only(kit: Path) -> None:
    content = json.loads((kit / "kit.json").read_text())
    with pytest.raises(mobilint_script.KitError, match="qubee cannot be told the bits"):
        mobilint_script.old_options(content)
    content["model"]["attentions"] = 0
    assert mobilint_script.old_options(content)["quantize_method"] == "maxpercentile"


def test_without_a_compiler_the_script_says_where_it_comes_from(kit: Path) -> None:
    done = subprocess.run([sys.executable, "-I", str(kit / "compile.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Mobilint's compiler is not installed here" in done.stderr
    assert "https://dl.mobilint.com" in done.stderr
    assert "not from PyPI" in done.stderr


# ---- finishing


@pytest.fixture(scope="module")
def compiled_once(kit_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kit = Path(shutil.copytree(kit_once, tmp_path_factory.mktemp("compiled") / "encoder.kit"))
    assert run_kit(kit).returncode == 0
    return kit


@pytest.fixture
def mxq(compiled_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled_once, tmp_path / "encoder.kit")) / "model.mxq"


def test_an_mxq_becomes_an_artifact_whose_fidelity_was_measured_on_the_board(
    mxq: Path, board: Any, tmp_path: Path
) -> None:
    put_on(board, mxq, noise=0.01)
    artifact = finish(mxq, tmp_path / "encoder.npu")
    assert artifact.target == "mobilint"
    assert artifact.precision == "a8w8"
    judged = artifact.manifest["fidelity"]
    assert judged["runtime"] == "mobilint"
    assert set(judged["outputs"]) == {"output_0", "output_1"}
    assert 30 < artifact.fidelity["output_0"].sqnr_db < 50  # 1 % of noise is 40 dB
    assert board.calls == 8  # the samples that judge
    assert artifact.manifest["files"]["mxq"]["sha256"] == sha256(mxq)
    section = artifact.manifest["mobilint"]
    assert section["compiler"]["version"] == "1.3.0"
    assert section["bits"]["activation"]["ffn"] == 8
    module = npu.NPUFrozenModule(artifact)  # "auto": there is a board
    assert module(make_images(3))[0].shape == (3, 16, 8)
    assert module.describe()["runtime"] == "mobilint"
    module.close()


def test_the_same_artifact_runs_on_the_cpu_where_there_is_no_board(mxq: Path, board: Any, tmp_path: Path) -> None:
    put_on(board, mxq)
    artifact = finish(mxq, tmp_path / "encoder.npu")
    module = npu.NPUFrozenModule(artifact, runtime="onnx")
    with torch.no_grad():
        right = make_encoder()(make_images(3))
    assert (module(make_images(3))[0] - right[0]).abs().max() < 0.3
    module.close()


def test_an_mxq_that_is_not_faithful_is_refused_with_this_compilers_remedies(tmp_path: Path, board: Any) -> None:
    kit = write_kit(tmp_path / "e.npu", min_sqnr_db=15.0)
    assert run_kit(kit).returncode == 0
    put_on(board, kit / "model.mxq", noise=1.0)
    with pytest.raises(npu.FidelityError, match="too far from the FP32") as caught:
        finish(kit / "model.mxq", tmp_path / "e.npu")
    remedy = str(caught.value.remedy)
    assert remedy.index("score_bits") < remedy.index("precision='a16w8'") < remedy.index("min_sqnr_db")
    assert not (tmp_path / "e.npu").exists()


def test_without_a_board_it_says_what_to_do_or_is_recorded_as_unmeasured(
    mxq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_npu.runtimes.mobilint import library

    monkeypatch.setattr(library, "DEVICE_FOLDER", str(tmp_path))
    with pytest.raises(RuntimeUnavailableError, match="Fidelity cannot be measured here") as caught:
        finish(mxq, tmp_path / "encoder.npu")
    assert "--no-fidelity" in str(caught.value.remedy)
    assert not (tmp_path / "encoder.npu").exists()
    artifact = finish(mxq, tmp_path / "encoder.npu", fidelity=False)
    assert artifact.manifest["fidelity"]["runtime"] == UNMEASURED
    assert artifact.fidelity == {}


def test_an_unmeasured_artifact_is_measured_when_a_board_first_opens_it(
    tmp_path: Path, board: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kit = write_kit(tmp_path / "e.npu", min_sqnr_db=15.0)
    assert run_kit(kit).returncode == 0
    artifact = finish(kit / "model.mxq", tmp_path / "e.npu", fidelity=False)
    put_on(board, kit / "model.mxq", noise=1.0)
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    with pytest.raises(npu.FidelityError):
        module(make_images(2))
    module.close()
    put_on(board, kit / "model.mxq")
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    with caplog.at_level(logging.INFO):
        module(make_images(2))
    assert "fidelity measured again" in caplog.text
    module.close()


def test_a_build_with_wider_scores_or_layers_is_never_called_a8w8(tmp_path: Path, board: Any) -> None:
    for index, options in enumerate(({"target_options": {"score_bits": 16}}, {"precision": "a16w8"})):
        output = tmp_path / f"{index}.npu"
        kit = write_kit(output, **options)
        assert run_kit(kit).returncode == 0
        put_on(board, kit / "model.mxq")
        artifact = finish(kit / "model.mxq", output)
        assert artifact.precision == "mixed"
    assert artifact.manifest["mobilint"]["bits"]["activation"]["ffn"] == 16


@pytest.mark.parametrize(
    ("bits", "attentions", "name"),
    [
        ({**bits_for("a8w8", 2), "score_layers": []}, 2, "a8w8"),
        ({**bits_for("a8w8", 2), "score_layers": ["m"]}, 2, "mixed"),
        ({**bits_for("a16w8", 2), "score_layers": []}, 2, "mixed"),
        ({"activation": {"ffn": 16}, "weight": {"ffn": 8}, "score_layers": []}, 0, "a8w8"),
        ({"activation": {"ffn": 8}, "weight": {"ffn": 4}, "score_layers": []}, 2, "mixed"),
    ],
)
def test_what_a_build_may_be_called(bits: dict[str, Any], attentions: int, name: str) -> None:
    assert precision_of(bits, attentions) == name


def test_an_mxq_of_unknown_making_is_refused(mxq: Path, tmp_path: Path) -> None:
    output, record = tmp_path / "e.npu", Path(f"{mxq}.json")
    text = record.read_text()
    record.unlink()
    with pytest.raises(CompileError, match=r"no record of how model\.mxq was built(.|\n)*python .*compile\.py"):
        finish(mxq, output)
    record.write_text(text[:-5])
    with pytest.raises(CompileError, match="is damaged"):
        finish(mxq, output)
    record.write_text(text)
    mxq.write_bytes(mxq.read_bytes() + b" ")
    with pytest.raises(CompileError, match="is the record of another MXQ"):
        finish(mxq, output)
    mxq.write_bytes(b"")
    with pytest.raises(ArtifactError, match="is empty"):
        finish(mxq, output)
    assert not output.exists()


def test_a_kit_that_was_edited_or_is_none_is_refused(mxq: Path, tmp_path: Path) -> None:
    kit, output = mxq.parent, tmp_path / "e.npu"
    text = (kit / "kit.json").read_text()
    for changed, message in (
        (text.replace('"score_bits": 8', '"score_bits": 16'), "was edited after"),
        (text.replace('"version": 1', '"version": 2', 1), "another version of lightning-npu"),
        (text[:40], "is damaged"),
        ("[]", "does not describe a compile kit"),
    ):
        (kit / "kit.json").write_text(changed)
        with pytest.raises(CompileError, match=message):
            finish(mxq, output)
    (kit / "kit.json").write_text(text)
    (kit / "judging.npz").write_bytes(b"other")
    with pytest.raises(CompileError, match=r"judging\.npz was changed or damaged"):
        finish(mxq, output)
    with pytest.raises(CompileError, match=r"is no compile kit(.|\n)*--finish KIT/model\.mxq"):
        finish(tmp_path / "model.mxq", output)


# ---- compile_module and offload


def test_with_a_compiler_installed_compile_module_gives_the_artifact(
    compiler: None, board: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed_compiler() == "qbcompiler of unknown version"
    from lightning_npu.compile import mobilint

    original = mobilint.run_script

    def and_plug_it_in(kit: Path) -> Path:
        made = original(kit)
        put_on(board, made)
        return made

    monkeypatch.setattr(mobilint, "run_script", and_plug_it_in)
    artifact = npu.compile_module(
        make_encoder(), (make_images(4),), calibration=list(make_images(40).split(8)), output=tmp_path / "e.npu",
        target="mobilint", min_sqnr_db=None,
    )  # fmt: skip
    assert artifact.target == "mobilint"
    assert artifact.fidelity["output_0"].sqnr_db > 80  # the fake computes in FP32
    assert [path.name for path in tmp_path.iterdir() if path.name != "dev"] == ["e.npu"]


def test_a_compiler_that_fails_leaves_the_kit_and_its_last_words(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_QBCOMPILER_FAILS", "NPU body is empty")
    with pytest.raises(CompileError, match=r"compiler failed on .*e\.kit(.|\n)*NPU body is empty"):
        npu.compile_module(
            make_encoder(), (make_images(4),), calibration=list(make_images(40).split(8)), output=tmp_path / "e.npu",
            target="mobilint", min_sqnr_db=None,
        )  # fmt: skip
    assert (tmp_path / "e.kit" / "compile.py").is_file()
    assert not (tmp_path / "e.npu").exists()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_encoder()

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0].sum()


def test_offload_tells_once_how_to_go_on_and_takes_the_artifact_when_it_is_there(tmp_path: Path, board: Any) -> None:
    output = tmp_path / "encoder.npu"
    options: dict[str, Any] = {
        "calibration": list(make_images(40).split(8)), "target": "mobilint", "output": output, "min_sqnr_db": None,
    }  # fmt: skip
    model = Policy().eval()
    original = model.encoder
    with pytest.raises(CompilerMissingError, match="was written to the compile kit"):
        npu.offload(model, "encoder", **options)
    assert model.encoder is original
    kit = tmp_path / "encoder.kit"
    with pytest.raises(CompilerMissingError, match="is there already and waits to be compiled"):
        npu.offload(model, "encoder", **options)
    assert run_kit(kit).returncode == 0
    with pytest.raises(CompilerMissingError, match=r"was compiled, but not made an artifact yet(.|\n)*--finish"):
        npu.offload(model, "encoder", **options)
    put_on(board, kit / "model.mxq")
    finish(kit / "model.mxq", output)
    encoder = npu.offload(model, "encoder", **options)
    assert model.encoder is encoder
    assert encoder.artifact.target == "mobilint"
    with torch.no_grad():
        right = make_encoder()(make_images(2))[0].sum()
    torch.testing.assert_close(model(make_images(2)), right, rtol=1e-4, atol=1e-3)
    encoder.close()


def test_the_kit_of_other_weights_is_not_taken_for_this_one(kit: Path) -> None:
    with pytest.raises(ArtifactError, match="is of another module"):
        npu.compile_module(
            make_encoder(seed=5), (make_images(4),), calibration=list(make_images(40).split(8)),
            output=kit.with_suffix(".npu"), target="mobilint", min_sqnr_db=None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target_options": {"cores": 3}}, InputError, "has no such options(.|\n)*'core_mode'"),
        ({"target_options": {"core_mode": "multi"}}, InputError, "core_mode is wrong(.|\n)*'global8'"),
        ({"target_options": {"score_bits": 4}}, InputError, "score_bits is wrong"),
        ({"target_options": {"normalize": {"mean": [0.5], "std": [0.0]}}}, InputError, "normalize is wrong"),
        ({"target_options": {"normalize": {"mean": [0.5] * 3, "std": [1] * 3}}}, InputError, "no input is uint8"),
        ({"precision": "fp32"}, CompileError, "no precision 'fp32'(.|\n)*target='onnx'"),
        ({"target": "onnx", "target_options": {"core_mode": "all"}}, InputError, "Target 'onnx' has no options"),
    ],
)
def test_wrong_options_are_told_and_leave_nothing(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        npu.compile_module(
            make_encoder(), (make_images(4),), calibration=list(make_images(40).split(8)),
            **{"output": tmp_path / "e.npu", "target": "mobilint", "min_sqnr_db": None, **options},
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_offload_cannot_change_what_the_submodule_is_given(tmp_path: Path) -> None:
    figures = {"mean": [0.5] * 3, "std": [0.5] * 3}
    with pytest.raises(InputError, match="normalize changes what the submodule takes"):
        npu.offload(
            Policy(), "encoder", calibration=[make_images(2)], target="mobilint", output=tmp_path / "e.npu",
            target_options={"normalize": figures},
        )  # fmt: skip


def test_options_have_defaults_that_the_kit_and_the_readme_name() -> None:
    options = MobilintOptions.from_mapping(None)
    assert (options.core_mode, options.score_bits, options.normalize, options.fidelity) == ("single", 8, None, True)


# ---- the registry


def test_nothing_depends_on_the_unrelated_packages_of_similar_names() -> None:
    texts = [(REPOSITORY / "pyproject.toml").read_text()]
    texts += [path.read_text() for path in (REPOSITORY / "constraints").glob("*.txt")]
    for text in texts:
        for name in ("qb-compiler", "qb_compiler", "qbcompiler", 'qb-runtime"', "qubee"):
            lines = [line for line in text.splitlines() if name in line and "mobilint-qb-runtime" not in line]
            assert lines == [], f"{name} on PyPI is not Mobilint's"
