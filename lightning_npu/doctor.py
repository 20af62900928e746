"""What this machine can run and, for each thing that it cannot, the one thing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_npu.doctor_mobilint import examine_mobilint
from lightning_npu.power import registry
from lightning_npu.runtimes.base import available
from lightning_npu.runtimes.cpu import available_cores, exact_u8s8, instruction_set


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "machine", "runtime", "mobilint", "power" or "package".
        name: what was looked at.
        ok: whether it can be used.
        text: what was found; where it is not usable, the reason and the remedy.
    """

    kind: str
    name: str
    ok: bool
    text: str

    @property
    def mark(self) -> str:
        """``[ok]`` or ``[--]``."""
        return "[ok]" if self.ok else "[--]"

    def to_json(self) -> dict[str, Any]:
        """The finding as primitives."""
        return {"kind": self.kind, "name": self.name, "ok": self.ok, "text": self.text}


def examine() -> list[Finding]:
    """Look at the processor, the GPU, every registered runtime and power sensor, and the packages that are needed."""
    findings = [_cpu(), _guarded("gpu", _gpu)]
    findings += [
        Finding("runtime", f"runtime {name}", answer.startswith("ok"), answer.removeprefix("ok: "))
        for name, answer in available().items()
    ]
    findings += [
        Finding("power", f"power sensors {name}", answer.startswith("ok"), answer.removeprefix("ok: "))
        for name, answer in registry.available().items()
    ]
    findings += [Finding("mobilint", name, ok, text) for name, ok, text in examine_mobilint()]
    findings += [_package(name, use) for name, use in _PACKAGES.items()]
    return findings


_PACKAGES = {
    "torch": "trains",
    "lightning": "runs the training loop",
    "onnx": "compiles artifacts",
    "onnxscript": "compiles artifacts",
    "onnxruntime": "compiles artifacts and runs them on the CPU",
}


def _cpu() -> Finding:
    name = instruction_set()
    note = "U8S8 products are exact" if exact_u8s8() else "U8S8 products saturate: recipe 'faithful' uses U8U8"
    cores = available_cores()
    mine = max(1, cores // 2)
    split = f"an artifact takes {mine}, and Prefetch leaves {max(1, cores - mine)} to torch when it trains on the CPU"
    return Finding("machine", "cpu", True, f"{name}; {note}; {cores} cores: {split}")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("machine", "gpu", True, f"{names} (CUDA {torch.version.cuda})")
    if torch.version.cuda is None:
        return Finding("machine", "gpu", False, f"torch {torch.__version__} is a build without CUDA")
    return Finding("machine", "gpu", False, "no CUDA device is visible; check the driver with nvidia-smi")


def _package(name: str, use: str) -> Finding:
    try:
        return Finding("package", name, True, f"{version(name)}; {use}")
    except PackageNotFoundError:
        return Finding("package", name, False, f"not installed; it {use}: pip install {name}")


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:  # a broken driver must not hide the rest of the report
        return Finding("machine", name, False, f"looking failed: {error!r}")
