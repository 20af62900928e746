"""The keys under which energy and look-ahead are logged: one name an idea, for loggers, files and dashboards alike.

Units are part of the name: joules, watts, seconds, bytes. Constants hold the default prefix; see :func:`with_prefix`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_npu.power.base import Board

PREFIX = "energy/"
NPU_PREFIX = "npu/"

KINDS = ("gpu", "npu", "cpu")
PHASES = ("train", "validation", "test", "predict", "data_wait", "checkpoint", "other")

# power now, all boards together and by kind
BOARD_POWER_W = "energy/board_power_w"
GPU_POWER_W = "energy/gpu_power_w"
NPU_POWER_W = "energy/npu_power_w"
CPU_POWER_W = "energy/cpu_power_w"

# gross energy since the run began, resumed runs included
TOTAL_J = "energy/total_j"
GPU_J = "energy/gpu_j"
NPU_J = "energy/npu_j"
CPU_J = "energy/cpu_j"

# energy per unit of work; net has idle power taken off
PER_SAMPLE_J = "energy/per_sample_j"
NET_PER_SAMPLE_J = "energy/net_per_sample_j"
PER_OPTIMIZER_STEP_J = "energy/per_optimizer_step_j"
STEP_J = "energy/step_j"  # mean of a rolling window
EPOCH_J = "energy/epoch_j"

# how far the figures can be trusted: of TOTAL_J
UNCERTAINTY_J = "energy/uncertainty_j"
COVERAGE = "energy/coverage"

ELAPSED_S = "energy/elapsed_s"
GPU_MEMORY_PEAK_BYTES = "energy/gpu_memory_peak_bytes"
POWER_TRACE = "energy/power_trace"  # a table: time_s, board, power_w

WAIT_S = "npu/wait_s"
HIT_RATE = "npu/hit_rate"
OVERLAP_EFFICIENCY = "npu/overlap_efficiency"
QUEUE_DEPTH = "npu/queue_depth"

FIXED = frozenset(
    value for name, value in dict(globals()).items() if name.isupper() and isinstance(value, str) and value[-1] != "/"
)
_FAMILIES = (
    re.compile(rf"energy/phase/({'|'.join(PHASES)})_j"),
    re.compile(r"energy/board/[^/]+/(power_w|counter_ratio)"),
    re.compile(r"npu/misses/[^/]+"),
)


def kind_power_w(kind: str) -> str:
    """Power of all boards of a kind: "gpu", "npu" or "cpu"."""
    return f"{PREFIX}{kind}_power_w"


def kind_j(kind: str) -> str:
    """Gross energy of all boards of a kind."""
    return f"{PREFIX}{kind}_j"


def phase_j(phase: str) -> str:
    """Gross energy of a phase, one of :data:`PHASES`."""
    return f"{PREFIX}phase/{phase}_j"


def board_power_w(name: str) -> str:
    """Power of one board, by its short name; see :func:`board_names`."""
    return f"{PREFIX}board/{name}/power_w"


def board_counter_ratio(name: str) -> str:
    """Energy counter of one board over its integrated power: 1.0 where both tell the same."""
    return f"{PREFIX}board/{name}/counter_ratio"


def misses(cause: str) -> str:
    """Calls that were computed on the spot, by cause."""
    return f"{NPU_PREFIX}misses/{cause}"


def with_prefix(key: str, prefix: str) -> str:
    """``key`` with ``prefix`` in the place of ``"energy/"``; keys of the look-ahead (``npu/``) stay as they are.

    >>> with_prefix("energy/total_j", "robot/energy/"), with_prefix("npu/wait_s", "robot/energy/")
    ('robot/energy/total_j', 'npu/wait_s')
    """
    return prefix + key[len(PREFIX) :] if key.startswith(PREFIX) else key


def is_logged(key: str, prefix: str = PREFIX) -> bool:
    """Whether ``key`` is one of those in this module.

    >>> is_logged("energy/board/npu0/power_w"), is_logged("energy/total"), is_logged("e/total_j", prefix="e/")
    (True, False, True)
    """
    if not key.startswith(NPU_PREFIX):
        if not key.startswith(prefix):
            return False
        key = PREFIX + key[len(prefix) :]
    return key in FIXED or any(family.fullmatch(key) for family in _FAMILIES)


def board_names(boards: Iterable[Board]) -> dict[str, str]:
    """Short names for keys and legends: kind and index ("gpu0"), the host before it if there are several.

    They are unique, and the same in every process that passes the same boards, in any order.

    Args:
        boards: all boards of the job.

    Returns:
        short name by board key.
    """
    ordered = sorted({board.key: board for board in boards}.values(), key=lambda board: board.key)
    hosts = {board.key.split("/")[0] for board in ordered}
    names: dict[str, str] = {}
    for number, board in enumerate(ordered):
        index = number if board.index is None else board.index
        parts = ["simulated"] if board.simulated else []
        parts += [board.key.split("/")[0]] if len(hosts) > 1 else []
        names[board.key] = "-".join([*parts, f"{board.kind}{index}"])
    counts, seen = Counter(names.values()), Counter[str]()
    for key, name in names.items():
        if counts[name] > 1:  # two sources count their boards from 0
            seen[name] += 1
            names[key] = f"{name}-{seen[name]}"
    return names
