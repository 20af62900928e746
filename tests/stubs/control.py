"""The control file that the stub libraries look at: the layout of ``trace_model.h``, seen from Python."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

MAGIC, LAYOUT = 0x4E505553545542, 2
MAX_BOARDS, MAX_FAULTS, MAX_SPANS, MAX_MIG, TEXT = 128, 16, 8, 7, 96
LOADS = {"constant": 0, "square": 1, "sine": 2, "telegraph": 3}
FAULTS = {
    "power_error": 1,
    "counter_error": 2,
    "lost": 3,
    "counter_reset": 4,
    "counter_freeze": 5,
    "counter_add": 6,
    "counter_wrap": 7,
    "power_value": 8,
    "power_freeze": 9,
    "slow": 10,
    "other_error": 11,
}
CALLS = ("init", "shutdown", "handle", "power", "counter", "fields", "other")
_Text = ctypes.c_char * TEXT
_Calls = ctypes.c_int64 * len(CALLS)


_INTEGERS = ("n_mig", "mig_mode", "architecture", "target_type", "chip_id", "load_kind")


def _doubles(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_double) for name in names.split()]


class SensorStruct(ctypes.Structure):
    _fields_ = [*_doubles("period_s window_s phase_s jitter"), ("supported", ctypes.c_int64)]


class FaultStruct(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int64), *_doubles("t0 t1 value")]


class SpanStruct(ctypes.Structure):
    _fields_ = _doubles("t0 t1 power_w")


class BoardStruct(ctypes.Structure):
    _fields_ = [
        *((name, _Text) for name in ("uuid", "name", "pci", "node", "slot")),
        ("mig", _Text * MAX_MIG),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *_doubles("low_w high_w period_s duty phase_s"),
        ("bits", ctypes.c_uint64),
        ("spans", SpanStruct * MAX_SPANS),
        ("n_spans", ctypes.c_int64),
        *((name, SensorStruct) for name in ("power", "instant", "average", "counter")),
        *_doubles("noise_w gain offset_w counter_gain epoch_s counter_start_j limit_w"),
        ("seed", ctypes.c_uint64),
        ("faults", FaultStruct * MAX_FAULTS),
        ("calls", _Calls),
    ]


class ControlStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("magic", "layout", "size")),
        *((name, ctypes.c_int64) for name in ("n_boards", "init_error")),
        *_doubles("call_s"),
        ("calls", _Calls),
        ("boards", BoardStruct * MAX_BOARDS),
    ]


def open_control(path: Path) -> ControlStruct:
    """Map the file at ``path``, made when it is not there; the mapping lives as long as the result."""
    size = ctypes.sizeof(ControlStruct)
    if not path.exists():
        path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        control = ControlStruct.from_buffer(mmap.mmap(file.fileno(), size))
    control.magic, control.layout, control.size = MAGIC, LAYOUT, size
    return control
