"""What a board is, written into the control file."""

from __future__ import annotations

import random

from .boards import Part, StubBoard
from .control import LOADS, BoardStruct, SensorStruct


def fill(struct: BoardStruct, board: StubBoard, index: int, start: float) -> None:
    """Write ``board``, number ``index``, whose sensors tick from about ``start`` on."""
    texts = {
        "uuid": board.uuid or f"GPU-{index:08x}-1111-2222-3333-444455556666",
        "name": board.name or "Stub",
        "pci": board.pci or f"00000000:{index + 0x10:02X}:00.0",
        "node": board.node or f"/dev/aries{index}",
        "slot": board.slot if board.slot is not None else f"0000:{index + 0x10:02x}:00.0",
    }
    for name, value in texts.items():
        setattr(struct, name, value.encode())
    for i, uuid in enumerate(board.mig):
        struct.mig[i].value = uuid.encode()
    sensed, load = board.sensed(), board.load
    struct.n_mig, struct.mig_mode = len(board.mig), int(bool(board.mig)) if sensed.architecture >= 7 else -1
    struct.architecture, struct.target_type, struct.chip_id = sensed.architecture, board.target_type, board.chip_id
    struct.load_kind, struct.bits = LOADS[load.kind], board.telegraph_bits(index)
    struct.low_w, struct.high_w, struct.period_s = load.low_w, load.high_w, load.period_s
    struct.duty, struct.phase_s = load.duty, load.phase_s
    chance = random.Random(f"ticks/{board.seed}/{index}")
    for name in ("power", "instant", "average", "counter"):
        part: Part | None = getattr(sensed, name)
        setattr(struct, name, _sensor(part, start, chance))
    if sensed.instant == sensed.power:
        struct.instant = struct.power  # two names of one sensor
    if sensed.counter and sensed.counter.window_s and sensed.power:
        struct.counter = struct.power  # it is renewed with what it adds up
        struct.counter.window_s = sensed.counter.window_s
    struct.noise_w, struct.seed = sensed.noise_w, board.seed * 1000 + index + 1
    struct.gain, struct.offset_w, struct.counter_gain = board.gain, board.offset_w, board.counter_gain
    struct.epoch_s, struct.counter_start_j, struct.limit_w = start, board.counter_start_j, board.limit_w


def _sensor(part: Part | None, start: float, chance: random.Random) -> SensorStruct:
    if part is None:
        return SensorStruct(0.0, 0.0, start, 0.0, 0)
    period_s = part.period_s * (1 + part.clock * chance.choice((-1, 1)) * chance.uniform(0.25, 1))
    return SensorStruct(period_s, part.window_s, start + chance.random() * period_s, part.jitter, 1)
