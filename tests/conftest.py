"""Small real modules and artifacts that the tests share."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stubs.fixtures import stub_mbltml, stub_nvml  # noqa: F401
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.worker import THREAD_NAME

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Encoder(nn.Module):
    """A small visual encoder: convolutions, tokens, one Transformer-like layer; returns tokens and a summary."""

    def __init__(self, width: int = 8, size: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.register_buffer("position", torch.randn(1, (size // 4) ** 2, width) * 0.1)
        self.layer = Layer(width)

    def forward(self, images: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        tokens = self.stem(images).flatten(2).transpose(1, 2) * scale
        tokens = self.layer(tokens + self.position)
        return tokens, tokens.mean(dim=1)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = (self.query(y) @ self.key(y).transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)
        return x + weights @ self.value(y)


def make_encoder(seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    return Encoder().eval()


def make_images(count: int, seed: int = 1) -> Tensor:
    """Smooth images, since noise has no ranges worth calibrating."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, size=16, mode="bilinear")


def compile_encoder(output: Path, *, seed: int = 0, **options: object) -> npu.Artifact:
    options = {"min_sqnr_db": None, **options}
    batches = list(make_images(40).split(8))
    return npu.compile_module(make_encoder(seed), (batches[0],), calibration=batches, output=output, **options)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> npu.Artifact:
    """An a8w8 artifact of ``make_encoder()``; tests must not change it: see ``artifact_copy``."""
    return compile_encoder(tmp_path_factory.mktemp("artifacts") / "encoder.npu")


@pytest.fixture(scope="session")
def compiled_fp32(tmp_path_factory: pytest.TempPathFactory) -> npu.Artifact:
    return compile_encoder(tmp_path_factory.mktemp("artifacts") / "encoder_fp32.npu", precision="fp32")


@pytest.fixture
def artifact_copy(compiled: npu.Artifact, tmp_path: Path) -> Path:
    """A copy of the artifact's folder that a test may damage."""
    return Path(shutil.copytree(compiled.path, tmp_path / "copy.npu"))


@pytest.fixture
def encoder() -> Encoder:
    return make_encoder()


@pytest.fixture
def images() -> Tensor:
    return make_images(4, seed=7)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Every test must release its devices: modules that go out of scope do so by themselves."""
    yield
    if _threads():
        gc.collect()
    left = _threads()
    assert not left, f"threads left behind: {left}"
