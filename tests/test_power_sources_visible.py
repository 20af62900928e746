"""CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, as CUDA and torch read them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from stubs import compiler

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.visible import Gpu, find_by_uuid, pci_address, visible_gpus

A = Gpu(0, "GPU-aaaaaaaa-1111", "H100", (0, 0x10, 0), ("MIG-1a1a", "MIG-1b1b"))
B = Gpu(1, "GPU-aaaabbbb-2222", "H100", (0, 0x20, 0))
C = Gpu(2, "GPU-cccccccc-3333", "H100", (0, 0x30, 0), ("MIG-2c2c",))
GPUS = [A, B, C]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [C]),
        ("2,0", [C, A]),
        (" 1 , 2", [B, C]),
        ("1gpu2,2ampere", [B, C]),
        ("0,2,-1,1", [A, C]),
        ("0,7,1", [A]),
        ("7", []),
        ("0,x,1", [A]),
        ("0,,1", [A]),
        ("1,1", []),
        ("0,GPU-cccc", [A]),
        ("GPU-cccccccc-3333", [C]),
        ("GPU-cccccccc-3333,GPU-aaaab", [C, B]),
        ("GPU-c,GPU-aaaaa", [C, A]),
        ("GPU-aaaa", []),
        ("GPU-", []),
        ("GPU-dddd,GPU-c", []),
        ("GPU-c,GPU-dddd,GPU-aaaab", [C]),
        ("GPU-c,GPU-ccc", []),
        ("GPU-c,1", [C]),
        ("GPU-c,MIG-1a1a", [C]),
        ("MIG-1a1a", [A]),
        ("MIG-1a1a,MIG-1b1b,MIG-2c2c", [A, A, C]),
        ("MIG-1", []),
        ("MIG-2", [C]),
        ("MIG-GPU-cccccccc-3333/1/0", [C]),
        ("MIG-GPU-dddddddd-3333/1/0", []),
    ],
)
def test_the_environment(value: str | None, expected: list[Gpu]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(GPUS, environ) == expected


def test_integers_follow_the_pci_bus_whatever_nvml_counts() -> None:
    late = Gpu(0, "GPU-l", "H100", (0, 0x40, 0))
    early = Gpu(1, "GPU-e", "H100", (0, 0x05, 0))
    unknown = Gpu(2, "GPU-u", "H100")
    assert visible_gpus([late, early, unknown], {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == [early, late, unknown]


def torch_like(*devices: object, initialised: bool = True) -> SimpleNamespace:
    cuda = SimpleNamespace(
        is_initialized=lambda: initialised,
        device_count=lambda: len(devices),
        get_device_properties=devices.__getitem__,
    )
    return SimpleNamespace(cuda=cuda)


def test_torch_knows_better_once_cuda_is_initialised() -> None:
    by_uuid = SimpleNamespace(uuid="cccccccc-3333")
    by_mig = SimpleNamespace(uuid="1b1b")
    by_pci = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x20, pci_device_id=0)
    environ = {"CUDA_VISIBLE_DEVICES": "0"}  # changed after CUDA was initialised: no effect
    assert visible_gpus(GPUS, environ, torch_like(by_uuid, by_mig, by_pci)) == [C, A, B]
    assert visible_gpus(GPUS, environ, torch_like(by_uuid, initialised=False)) == [A]
    assert visible_gpus(GPUS, environ, torch_like(SimpleNamespace(uuid="eeee"))) == [A]


def test_pci_addresses() -> None:
    assert pci_address("00000000:3B:00.0") == (0, 0x3B, 0)
    assert pci_address("0001:3b:1f") == (1, 0x3B, 0x1F)
    assert pci_address("3B:00.0") == (0, 0x3B, 0)
    assert pci_address("") is None
    assert find_by_uuid(GPUS, "3B:00.0") is None


MIXED = [Gpu(0, "GPU-slow", "T4", (0, 0x10, 0)), Gpu(1, "GPU-fast", "H100", (0, 0x20, 0))]


def test_different_models_in_the_order_of_the_bus() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(MIXED, environ) == [MIXED[1]]
    assert visible_gpus(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-slow"}) == [MIXED[0]]
    assert visible_gpus(MIXED, {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus(MIXED, {}, ordered=False) == MIXED


@pytest.fixture
def libcuda(tmp_path: Path) -> dict[str, str]:
    """A libcuda.so.1 that counts the faster board first and knows CUDA_VISIBLE_DEVICES=1."""
    cc = compiler()
    if cc is None:
        pytest.skip("no C compiler to build a stub of libcuda.so.1 with")
    (tmp_path / "cuda.c").write_text("""
#include <stdlib.h>
#include <string.h>
static int first(void) { const char *v = getenv("CUDA_VISIBLE_DEVICES"); return v && !strcmp(v, "1"); }
int cuInit(unsigned flags) { (void)flags; return getenv("STUB_CUDA_ERROR") ? atoi(getenv("STUB_CUDA_ERROR")) : 0; }
int cuDeviceGetCount(int *n) { *n = 2 - first(); return 0; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal + first(); return 0; }
int cuDeviceGetPCIBusId(char *to, int room, int d) { strncpy(to, d ? "0000:10:00.0" : "0000:20:00.0", room); return 0; }
""")
    output = tmp_path / "libcuda.so.1"
    subprocess.run([cc, "-shared", "-fPIC", "-o", output, tmp_path / "cuda.c"], check=True)
    return {"LD_LIBRARY_PATH": str(tmp_path)}


def test_cuda_is_asked_which_of_different_models_is_first(libcuda: dict[str, str]) -> None:
    slow, fast = MIXED
    assert visible_gpus(MIXED, libcuda) == [fast, slow]
    assert visible_gpus(MIXED, {**libcuda, "CUDA_VISIBLE_DEVICES": "1"}) == [slow]
    assert visible_gpus(MIXED, {**libcuda, "STUB_CUDA_ERROR": "100"}) == []


def test_what_cannot_be_known_is_not_guessed(libcuda: dict[str, str], tmp_path: Path) -> None:
    for environ in ({"LD_LIBRARY_PATH": str(tmp_path / "none")}, {**libcuda, "STUB_CUDA_ERROR": "999"}):
        with pytest.raises(PowerUnavailableError, match=r"different models(.|\n)*'0'(.|\n)*PCI_BUS_ID") as caught:
            visible_gpus(MIXED, {**environ, "CUDA_VISIBLE_DEVICES": "0"})
    assert "CUDA error 999" in str(caught.value)
    # the board that torch names is not among those that NVML shows
    with pytest.raises(PowerUnavailableError, match="KeyError"):
        visible_gpus([MIXED[0], Gpu(1, "GPU-x", "A100", (0, 0x99, 0))], {**libcuda, "CUDA_VISIBLE_DEVICES": "0"})
