"""Which physical GPUs this process sees, and under which CUDA ordinals. All rules are here.

``CUDA_VISIBLE_DEVICES`` names what CUDA shows to a process, and in which order:

- unset: every GPU; empty: none;
- integers count GPUs in the order of ``CUDA_DEVICE_ORDER`` (below); each is read as C reads a number, so that
  " 1x" is 1; -1, or anything that is no number, ends the list; so does an index that does not exist; an index that
  comes twice leaves nothing;
- ``GPU-...``: a UUID or the beginning of one; one that fits no GPU, or two, ends the list; a board that comes twice
  leaves nothing;
- ``MIG-...``: a MIG device, by its UUID or its beginning; or ``MIG-GPU-<uuid>/<gpu instance>/<compute instance>``, as
  older drivers name it. The board is the one that the MIG device is a part of. Power is measured for whole boards:
  what a MIG device uses is not known, and its neighbours' power is included.
- The first entry says which kind the others are; another kind ends the list, as in torch.

``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID`` or, by default, ``FASTEST_FIRST``, whose order CUDA does not document. Among
GPUs of one model it is that of the PCI bus. Where models differ, CUDA itself is asked, in a process of its own: to
initialise CUDA in this process would break a later fork.

Once torch has initialised CUDA in this process, the environment no longer counts: torch knows the UUID or the PCI
address of each of its devices.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_npu.errors import PowerUnavailableError

VARIABLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_NUMBER = re.compile(r"\s*([+-]?\d+)")
_ASK = """
import ctypes
cuda, count, device, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(64)
def check(code):
    if code not in (0, 100):  # 100: no device
        raise SystemExit(f"CUDA error {code}")
    return code == 0
if check(cuda.cuInit(0)) and check(cuda.cuDeviceGetCount(ctypes.byref(count))):
    for ordinal in range(count.value):
        check(cuda.cuDeviceGet(ctypes.byref(device), ordinal))
        check(cuda.cuDeviceGetPCIBusId(text, 64, device))
        print(text.value.decode())
"""


@dataclass(frozen=True)
class Gpu:
    """A physical GPU as NVML shows it.

    Attributes:
        index: NVML's number.
        uuid: ``"GPU-..."``.
        name: the model.
        pci: PCI domain, bus and device; None: not known.
        mig: UUIDs of its MIG devices.
    """

    index: int
    uuid: str
    name: str = ""
    pci: tuple[int, int, int] | None = None
    mig: tuple[str, ...] = ()


def pci_address(text: str) -> tuple[int, int, int] | None:
    """``"00000000:3B:00.0"`` as (domain, bus, device); None for what is no PCI address."""
    match = re.fullmatch(r"(?:([0-9a-f]+):)?([0-9a-f]+):([0-9a-f]+)(?:\.[0-9a-f]+)?", text.strip(), re.IGNORECASE)
    return match and (int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16))


def visible_gpus(
    gpus: Sequence[Gpu], environ: Mapping[str, str], torch: Any = None, *, ordered: bool = True
) -> list[Gpu]:
    """The physical GPU behind each CUDA ordinal of this process.

    Args:
        gpus: all GPUs that NVML shows.
        environ: the environment.
        torch: the module, if it is imported.
        ordered: whether it matters which is which; if not, all GPUs are given without asking for their order.

    Raises:
        PowerUnavailableError: the order of different models matters and CUDA cannot be asked.
    """
    by_torch = _by_torch(gpus, torch)
    if by_torch is not None:
        return by_torch
    text = environ.get(VARIABLE)
    if text is None:
        known = in_cuda_order(gpus, environ) if ordered else list(gpus)
        return _ask_cuda(gpus, environ) if known is None else known
    if text.startswith(("GPU-", "MIG-")):
        return _by_uuid(gpus, text.split(","), text[:4])
    wanted = _integers(text)
    if not wanted:
        return []
    known = in_cuda_order(gpus, environ)
    if known is None:
        return _ask_cuda(gpus, environ)
    found = []
    for index in wanted:
        if index >= len(known):
            break
        found.append(known[index])
    return found


def find_by_uuid(gpus: Sequence[Gpu], text: str) -> Gpu | None:
    """The GPU that a UUID or the beginning of one means, or that a MIG device is a part of; None: no or several."""
    text = text.strip()
    if text.startswith("MIG-GPU-"):
        text = text[len("MIG-") :].split("/")[0]
    if text.startswith("MIG-"):
        parts = [(gpu, uuid) for gpu in gpus for uuid in gpu.mig if uuid.startswith(text)]
        return parts[0][0] if len(parts) == 1 else None
    fitting = [gpu for gpu in gpus if text.startswith("GPU-") and gpu.uuid.startswith(text)]
    return fitting[0] if len(fitting) == 1 else None


def in_cuda_order(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu] | None:
    """The GPUs as CUDA counts them; None where that cannot be known from outside of CUDA."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.pci or (sys.maxsize, 0, 0), gpu.index))
    if environ.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2:
        return ordered
    return None


def _integers(text: str) -> list[int]:
    found: list[int] = []
    for entry in text.split(","):
        match = _NUMBER.match(entry)
        index = int(match[1]) if match else -1
        if index < 0:
            break
        if index in found:
            return []
        found.append(index)
    return found


def _by_uuid(gpus: Sequence[Gpu], entries: Sequence[str], prefix: str) -> list[Gpu]:
    found: list[Gpu] = []
    for entry in entries:
        gpu = find_by_uuid(gpus, entry) if entry.startswith(prefix) else None
        if gpu is None:
            break
        if prefix == "GPU-" and gpu in found:
            return []
        found.append(gpu)
    return found


def _by_torch(gpus: Sequence[Gpu], torch: Any) -> list[Gpu] | None:
    """What torch knows about its devices; None: CUDA is not initialised, or a device is not among ``gpus``."""
    if torch is None or not torch.cuda.is_initialized():
        return None
    found = []
    for ordinal in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(ordinal)
        uuid = str(getattr(properties, "uuid", "unknown"))
        gpu = find_by_uuid(gpus, f"GPU-{uuid}") or find_by_uuid(gpus, f"MIG-{uuid}")
        if gpu is None and hasattr(properties, "pci_bus_id"):
            address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            gpu = next((gpu for gpu in gpus if gpu.pci == address), None)
        if gpu is None:
            return None
        found.append(gpu)
    return found


def _ask_cuda(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """What CUDA says in a process of its own with the same environment."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        by_address = {gpu.pci: gpu for gpu in gpus}
        return [by_address[pci_address(line)] for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        detail = (getattr(error, "stderr", None) or repr(error)).strip().splitlines()[-1]
        raise PowerUnavailableError(
            "Which of these GPUs this process uses is not known: they are of different models, and CUDA, which puts "
            "the fastest first, cannot be asked.",
            expected=f"{ORDER}=PCI_BUS_ID, or UUIDs in {VARIABLE}",
            got=f"{VARIABLE}={environ.get(VARIABLE)!r}; {detail}",
            remedy=f"export {ORDER}=PCI_BUS_ID",
        ) from error
