"""Boards with a known load and sensors like those of real ones, and the exact energy they use, in plain Python."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

ARIES_RB = 3


@dataclass(frozen=True)
class Load:
    """A power trace that repeats itself, in watts over ``time.monotonic()``.

    ``period_s`` is one period of a square or sine, one step of a telegraph signal (64 random levels, repeated).
    ``phase_s`` shifts it to the right; None: at random.
    """

    kind: str = "square"
    low_w: float = 50.0
    high_w: float = 180.0
    period_s: float = 1.0
    duty: float = 0.5
    phase_s: float | None = None

    @classmethod
    def constant(cls, power_w: float) -> Load:
        return cls("constant", power_w, power_w)


@dataclass(frozen=True)
class Part:
    """One reading that a board offers.

    Attributes:
        period_s: a new value comes every so many seconds.
        window_s: it is a mean over so many seconds before; 0: of that moment.
        jitter: values come early or late by up to this share of the period.
        clock: its clock runs fast or slow by a quarter of this share to all of it. Without that a load whose period
            fits the sensor's would be seen in one phase for ever, by every meter there can be.
    """

    period_s: float = 0.1
    window_s: float = 0.0
    jitter: float = 0.02
    clock: float = 0.02


@dataclass(frozen=True)
class Sensors:
    """What a board can be asked for; None: not supported.

    Attributes:
        power: ``nvmlDeviceGetPowerUsage`` or ``mbltmlGetTotalPower``.
        counter: the energy counter; ``window_s`` > 0: it does not see all of the time but adds up the power readings,
            each for the time since the one before.
        instant: field value 186.
        average: field value 185.
        noise_w: standard deviation of power readings, watts.
        architecture: as NVML counts it, such as 7 for Ampere.
    """

    power: Part | None = Part()
    counter: Part | None = None
    instant: Part | None = None
    average: Part | None = None
    noise_w: float = 0.0
    architecture: int = 7


_MEAN_1S, _FAST = Part(0.1, 1.0), Part(0.02, 0.01)
SENSORS: dict[str, Sensors] = {
    "a100": Sensors(Part(0.1, 0.025), Part(0.1), Part(0.1, 0.025), _MEAN_1S),
    "a100n": Sensors(Part(0.1, 0.025), Part(0.1), Part(0.1, 0.025), _MEAN_1S, noise_w=0.5),
    # whether real counters see all of the time or add up the power sensor's part of it is not published
    "a100s": Sensors(Part(0.1, 0.025), Part(0.1, 0.025), Part(0.1, 0.025), _MEAN_1S),
    "v100": Sensors(_FAST, Part(0.02), _FAST, architecture=5),
    "v100n": Sensors(_FAST, Part(0.02), _FAST, noise_w=0.5, architecture=5),
    "hopper": Sensors(_MEAN_1S, Part(0.1), Part(0.1, 0.025), _MEAN_1S, architecture=9),
    # the same board under a driver that offers the mean alone
    "hopper-mean": Sensors(_MEAN_1S, Part(0.1), architecture=9),
    # no counter; Zeus needs field 186 there
    "pascal": Sensors(_FAST, instant=_FAST, architecture=4),
    "pascaln": Sensors(_FAST, instant=_FAST, noise_w=0.5, architecture=4),
    "npu": Sensors(Part(0.1)),
    "npun": Sensors(Part(0.1), noise_w=0.2),
    "npu1s": Sensors(Part(1.0)),
    # sensors without a flaw, for tests about something else
    "ideal": Sensors(Part(0.0), Part(0.0), Part(0.0), _MEAN_1S),
}
NPU_LOAD = Load(low_w=8.0, high_w=25.0)


@dataclass(frozen=True)
class StubBoard:
    """A board of a stub library.

    Attributes:
        load: the power it really draws.
        sensors: how it is seen; a name of :data:`SENSORS`, or one's own.
        uuid: None: made from its index. NPUs have none.
        pci: ``"00000000:3B:00.0"``; None: made from its index.
        mig: UUIDs of its MIG devices; MIG mode is on where there are any.
        limit_w: enforced power limit; 0: not supported.
        node, slot, chip_id, target_type: how mbltml names it.
        utilization: whether utilization, memory, temperature and power limit can be read.
        gain, offset_w: what power readings are multiplied by and raised by.
        counter_gain: the same of the counter's steps.
        counter_start_j: what the counter says at the beginning.
        seed: of noise, random phases and telegraph levels.
    """

    load: Load = field(default_factory=Load)
    sensors: str | Sensors = "a100"
    name: str = ""
    uuid: str | None = None
    pci: str | None = None
    mig: tuple[str, ...] = ()
    limit_w: float = 400.0
    node: str | None = None
    slot: str | None = None
    chip_id: int = 0
    target_type: int = ARIES_RB
    utilization: bool = True
    gain: float = 1.0
    offset_w: float = 0.0
    counter_gain: float = 1.0
    counter_start_j: float = 593_971.0
    seed: int = 0

    def sensed(self) -> Sensors:
        return SENSORS[self.sensors] if isinstance(self.sensors, str) else self.sensors

    def with_phase(self, index: int, start_s: float) -> StubBoard:
        """The same board with its load's phase settled and anchored near ``start_s``."""
        phase = self.load.phase_s
        if phase is None:
            phase = random.Random(f"{self.seed}/{index}").random() * self.load.period_s
        return replace(self, load=replace(self.load, phase_s=start_s + phase))

    def telegraph_bits(self, index: int) -> int:
        return random.Random(f"bits/{self.seed}/{index}").getrandbits(64)


def load_j(load: Load, bits: int, t0: float, t1: float) -> float:
    """Exact energy of ``load`` between two moments, added up from one change of level to the next."""
    assert load.phase_s is not None
    if t1 <= t0:
        return 0.0
    if load.kind == "constant":
        return load.high_w * (t1 - t0)
    if load.kind == "sine":
        turn = 2 * math.pi / load.period_s
        wave = (math.cos(turn * (t0 - load.phase_s)) - math.cos(turn * (t1 - load.phase_s))) / turn
        return (load.low_w + load.high_w) / 2 * (t1 - t0) + (load.high_w - load.low_w) / 2 * wave
    total = 0.0
    k = math.floor((t0 - load.phase_s) / load.period_s)
    while (begin := load.phase_s + k * load.period_s) < t1:
        if load.kind == "square":
            pieces = [(load.high_w, load.duty * load.period_s), (load.low_w, (1 - load.duty) * load.period_s)]
        else:
            pieces = [(load.high_w if bits >> (k % 64) & 1 else load.low_w, load.period_s)]
        for power_w, length in pieces:
            total += power_w * max(0.0, min(t1, begin + length) - max(t0, begin))
            begin += length
        k += 1
    return total
