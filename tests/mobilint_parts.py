"""Boards and artifacts for the tests of runtime 'mobilint'.

The fixture ``board`` runs each test twice: over a fake ``qbruntime``, and over the vendor's own Python layer, of which
only the C++ classes that need a device are replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_encoder

import lightning_npu as npu
from lightning_npu.manifest import MANIFEST, fingerprint, sha256_file, sha256_json
from lightning_npu.runtimes.mobilint import library
from lightning_npu.worker import Worker

FAKES = Path(__file__).parent / "fakes"
HAS_VENDOR = importlib.util.find_spec("qbruntime") is not None
needs_vendor = pytest.mark.skipif(not HAS_VENDOR, reason="mobilint-qb-runtime is not installed")
VARIABLES = (
    library.LOG_LEVEL, library.TIMEOUT, library.VISIBLE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK",
)  # fmt: skip


def fake_module() -> ModuleType:
    """The fake, under a name of its own, so that the real one can be imported as well."""
    if "fake_qbruntime" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "fake_qbruntime", FAKES / "qbruntime" / "__init__.py", submodule_search_locations=[str(FAKES / "qbruntime")]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["fake_qbruntime"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["fake_qbruntime"]


def new_board() -> Any:
    return fake_module()._core.reset()


def plug_in(layer: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """A board with one device behind ``import qbruntime``; ``layer`` is "fake" or "vendor"."""
    core, board = fake_module()._core, new_board()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "_our_timeout", None)
    (folder / "aries0").touch()
    monkeypatch.setattr(library, "DEVICE_FOLDER", str(folder))
    if layer == "fake":
        board.native = fake_module()
        monkeypatch.setitem(sys.modules, "qbruntime", fake_module())
        monkeypatch.setattr(library, "missing", lambda: None)
        fake_module().set_log_level(fake_module().LogLevel.Off)
        return board
    vendor = importlib.import_module("qbruntime.qbruntime")
    board.native, board.error = vendor, vendor.QbRuntimeError
    core.Board.log_level = "Off"
    monkeypatch.setattr(vendor, "Accelerator", core.Accelerator)
    monkeypatch.setattr(vendor, "Model", core.Model)
    monkeypatch.setattr(vendor, "get_available_device_numbers", lambda *_: list(core.board.numbers))
    return board


@pytest.fixture(params=["fake", "vendor"])
def board(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    if request.param == "vendor" and not HAS_VENDOR:
        pytest.skip("mobilint-qb-runtime is not installed")
    (tmp_path / "dev").mkdir()
    made = plug_in(request.param, monkeypatch, tmp_path / "dev")
    yield made
    made.released.set()
    assert not made.disposed_under_a_call
    assert "destroyed while launched" not in made.events


def port(shape: Sequence[int], dtype: str = "float32") -> dict[str, Any]:
    return {"layout": "HWC", "dtype": dtype, "shape": list(shape)}


def make_mobilint(source: Path, output: Path, **section: Any) -> npu.Artifact:
    """A copy of an ONNX artifact as one for the board, with a file that begins as an MXQ does."""
    shutil.copytree(source, output)
    return finish(output, **section)


def finish(folder: Path, *, content: bytes = b".MXQ" + bytes(100), **section: Any) -> npu.Artifact:
    (folder / "model.mxq").write_bytes(content)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["target"] = "mobilint"
    manifest["files"]["mxq"] = {
        "path": "model.mxq", "sha256": sha256_file(folder / "model.mxq"), "bytes": len(content)
    }  # fmt: skip
    manifest["mobilint"] = {
        "file": "model.mxq",
        "core_mode": "single",
        "compiler": {"name": "fake", "version": "1.4.0", "target_device": "aries-rb"},
        "bits": {"activation": {"all": 8}, "weight": {"all": 8}, "score_layers": []},
        "inputs": [port((16, 16, 3))],
        "outputs": [
            {"shape": [1, 16, 8], "dtype": "float32"},
            {"shape": [1, 1, 8], "dtype": "float32"},
        ],
        **section,
    }
    return rewrite(folder, manifest)


def rewrite(folder: Path, manifest: Mapping[str, Any]) -> npu.Artifact:
    manifest = dict(manifest)
    manifest["fingerprint"] = fingerprint(manifest)
    manifest["manifest_sha256"] = sha256_json(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return npu.Artifact.load(folder)


def hold_encoder(board: Any) -> None:
    """The board's MXQ computes what ``make_encoder()`` does, in FP32."""
    encoder = make_encoder()
    board.inputs, board.outputs = [(16, 16, 3)], [(1, 16, 8), (1, 1, 8)]

    def compute(arrays: list[np.ndarray]) -> list[np.ndarray]:
        image = torch.from_numpy(np.ascontiguousarray(arrays[0])).float().permute(2, 0, 1)[None]
        with torch.no_grad():
            tokens, summary = encoder(image)
        return [tokens.numpy().reshape(1, 16, 8), summary.numpy().reshape(1, 1, 8)]

    board.compute = compute


@pytest.fixture
def artifact(board: Any, compiled: npu.Artifact, tmp_path: Path) -> npu.Artifact:
    """``make_encoder()`` for the board, which computes it."""
    hold_encoder(board)
    return make_mobilint(compiled.path, tmp_path / "encoder.npu")


def worker_of(runtime: Any, **options: Any) -> Worker:
    return Worker(lambda: runtime, **options)
