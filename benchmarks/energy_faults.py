"""The fault table of energy_accuracy.py: what each meter says when something breaks, beside what is true.

Each row runs every meter, each in a process of its own, over one stub and one window of about 5 s. The load
is a square wave of 50 and 180 W (NPU: 8 and 25 W) of 0.7 s, which no meter samples in step.
A cell is right when its joules are within 3 % of the truth (6 % where all that is left is a power that shows ten
moments per second, 15 % where that is silent for two seconds) and, if the meter states an uncertainty, within
it. A lost or unknown board must be said to be one, and never be 0 J.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from energy_workers import Worker
from stubs import NPU_LOAD, Load, StubBoard, StubMbltml, StubNvml

GPU_TOOLS = ("ours", "zeus", "codecarbon", "mblt")
WINDOW_S = 5.0
SETTLE_S = 3.0
MOMENTS = 0.06  # ten moments per second are all that there is
BLIND = 0.15  # for two of five seconds the only sensor says nothing
Stubs = dict[str, Any]
_LOAD = Load(period_s=0.7)
MIG = "MIG-5c1a1a5e-0000-1111-2222-333344445555"


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes:
        title: what breaks.
        gpus, npus: the boards.
        breaks: called with the stubs and the seconds until the window begins.
        tools: meters that can measure such boards.
        environment: of the meters' processes.
        counts: the boards whose joules should come out, as "gpu/0".
        ranks: how many processes run each meter.
        hold: seconds into the window, and for how long the interpreter lock is held.
        unknown: no number is right: none must be made up, and the reason must be said.
        lost_at: seconds into the window after which nobody can know.
        tolerance: how far from the truth is right, as a share of it.
    """

    title: str
    gpus: tuple[StubBoard, ...] = (StubBoard(_LOAD),)
    npus: tuple[StubBoard, ...] = ()
    breaks: Callable[[Stubs, float], object] = lambda stubs, wait: None
    tools: tuple[str, ...] = GPU_TOOLS
    environment: dict[str, str | None] = field(default_factory=dict)
    counts: tuple[str, ...] = ("gpu/0",)
    ranks: int = 1
    hold: tuple[float, float] | None = None
    unknown: bool = False
    lost_at: float | None = None
    tolerance: float = 0.03


def _fault(kind: str, value: float, after: float, for_s: float | None = None, on: str = "gpu") -> Callable[..., object]:
    return lambda stubs, wait: stubs[on].fault(0, kind, value, after_s=wait + after, for_s=for_s)


def _span(stubs: Stubs, wait: float) -> None:
    for stub in stubs.values():
        stub.span(0, 180.0 if stub is stubs["gpu"] else 25.0, after_s=wait + 1.0, for_s=3.0)


def _visible(devices: str) -> dict[str, str | None]:
    return {"CUDA_VISIBLE_DEVICES": devices}


def _slow(stubs: Stubs, wait: float) -> None:
    stubs["gpu"].call_s = 0.06


_NPU = (StubBoard(replace(NPU_LOAD, period_s=0.7), "npu"),)
_ONE = "GPU-00000001-1111-2222-3333-444455556666"
_PAIR = (StubBoard(_LOAD), StubBoard(_LOAD))
_PASCAL = (StubBoard(_LOAD, "pascaln"),)
_UNCOUNTED = {"gpus": _PASCAL, "tools": ("ours", "zeus power", "codecarbon", "mblt")}
_ON_NPU: dict[str, Any] = {"gpus": (), "npus": _NPU, "tools": ("ours", "mblt npu", "mblt npu 0.1 s")}
_ON_NPU |= {"counts": ("npu/0",), "tolerance": MOMENTS}
_ON_ONE = {"gpus": _PAIR, "counts": ("gpu/1",)}
ROWS = (
    Row("clean"),
    Row("clean, NPU", **_ON_NPU),
    Row("counter fails 1 s to 2.5 s", breaks=_fault("counter_error", 999, 1.0, 1.5)),
    Row("counter fails from 3.5 s on", breaks=_fault("counter_error", 999, 3.5), tolerance=MOMENTS),
    Row("counter freezes from 1 s on", breaks=_fault("counter_freeze", 0, 1.0), tolerance=MOMENTS),
    Row("counter reset at 2.5 s", breaks=_fault("counter_reset", 0, 2.5)),
    Row("counter 5 MJ too high for 1 s", breaks=_fault("counter_add", 5e6, 2.0, 1.0)),
    Row("GPU lost at 2.5 s", breaks=_fault("lost", 15, 2.5), lost_at=2.5),
    Row("power errors 2 s", breaks=_fault("power_error", 999, 1.5, 2.0)),
    Row("power errors 2 s, NPU", breaks=_fault("power_error", 4, 1.5, 2.0, "npu"), **{**_ON_NPU, "tolerance": BLIND}),
    Row("power -1 for 2 s, NPU", breaks=_fault("power_value", -1, 1.5, 2.0, "npu"), **{**_ON_NPU, "tolerance": BLIND}),
    Row("power reads 4 MW for 0.2 s", breaks=_fault("power_value", 4e6, 2.0, 0.2), **_UNCOUNTED),
    Row("no counter", **_UNCOUNTED),
    Row("constant 100 W, no counter", **{**_UNCOUNTED, "gpus": (StubBoard(Load.constant(100.0), "pascal"),)}),
    Row("utilization unsupported", (StubBoard(_LOAD, utilization=False),)),
    Row("CUDA_VISIBLE_DEVICES=MIG-...", (StubBoard(_LOAD, mig=(MIG,)), StubBoard(_LOAD)), environment=_visible(MIG)),
    Row("CUDA_VISIBLE_DEVICES=GPU-<uuid of 1>", environment=_visible(_ONE), **_ON_ONE),
    Row("CUDA_VISIBLE_DEVICES=1 of 2", environment=_visible("1"), **_ON_ONE),
    Row("no NVML library", environment={"LD_LIBRARY_PATH": None}, unknown=True),
    Row("60 ms per call", breaks=_slow),
    Row("2 ranks, 2 GPUs each, sum", _PAIR, counts=("gpu/0", "gpu/1"), ranks=2),
    Row("2 ranks on one GPU, sum", ranks=2),
    Row("interpreter lock held 3 s at 180 W", breaks=_span, hold=(1.0, 3.0)),
    Row("the same, no counter", breaks=_span, hold=(1.0, 3.0), **_UNCOUNTED),
    Row("the same, NPU at 25 W", breaks=_span, hold=(1.0, 3.0), **_ON_NPU),
)


def table(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the rows and print them."""
    print("\nfault table: joules of a 5 s window; * right")
    rows = [row for row in ROWS if not names or any(name.lower() in row.title.lower() for name in names)]
    return [_print(_run(row)) for row in rows]


def _run(row: Row) -> dict[str, Any]:
    with ExitStack() as stack:
        stubs: Stubs = {"gpu": stack.enter_context(StubNvml(row.gpus or (StubBoard(_LOAD),)))}
        if row.npus:
            stubs["npu"] = stack.enter_context(StubMbltml(row.npus))
        if row.breaks is _slow:
            stubs["gpu"].call_s = 0.06
        ready, cells = [], {}
        boards = {"gpus": None if row.gpus else [], "npus": None if row.npus else []}
        workers = [(tool, Worker(tool, row.environment, **boards)) for tool in row.tools for _ in range(row.ranks)]
        for tool, worker in workers:
            stack.callback(worker.close)
            if worker.wait_ready():
                ready.append((tool, worker))
            else:
                cells[tool] = {"said": f"cannot be made: {worker.raised}", "right": False}
        start = time.monotonic() + SETTLE_S
        row.breaks(stubs, start - time.monotonic())
        for number, (_, worker) in enumerate(ready):
            shift = start + 0.005 * number
            hold = row.hold and (shift + row.hold[0], row.hold[1])
            worker.run([(shift, shift + WINDOW_S)], hold=hold, rest_s=1.5)
        results: dict[str, list[dict[str, Any]]] = {}
        for tool, worker in ready:
            results.setdefault(tool, []).extend(worker.results() or [{"raised": worker.raised}])
        for tool, windows in results.items():
            cells[tool] = _judge(row, tool, windows, stubs, start)
        truth = sum(_truth(name, stubs, start, start + WINDOW_S) for name in row.counts)
        return {"title": row.title, "truth_j": None if row.unknown else truth, "cells": cells}


def _truth(name: str, stubs: Stubs, t0: float, t1: float) -> float:
    kind, _, index = name.partition("/")
    return float(stubs[kind].truth_j(int(index), t0, t1))


def _judge(row: Row, tool: str, windows: list[dict[str, Any]], stubs: Stubs, start: float) -> dict[str, Any]:
    raised = [window["raised"] for window in windows if window.get("raised")]
    if raised:
        return {"said": f"raises {raised[0]}", "right": False}
    merged = _merge(tool, windows)
    figures = [figure for figure in merged.values() if figure["j"] is not None]
    states = sorted({str(figure["state"]) for figure in merged.values() if figure.get("state")})
    if not figures:
        # silence is not an answer: a meter that has nothing must say why
        return {"said": f"nothing {states[0] if states else ''}", "right": row.unknown and bool(states)}
    joules = sum(figure["j"] for figure in figures)
    calls = windows[0]["calls"]
    t0, t1 = calls[1], calls[2]
    truth = sum(_truth(name, stubs, t0, t1) for name in row.counts)
    cell: dict[str, Any] = {"j": joules, "truth_j": truth, "states": states}
    error = abs(joules - truth)
    right = not row.unknown and error <= row.tolerance * truth
    if "u_j" in figures[0]:
        cell["u_j"] = sum(figure["u_j"] for figure in figures)
        cell["coverage"] = min(figure["coverage"] for figure in figures)
        right = right and error <= cell["u_j"]
        if row.lost_at is not None:  # nothing is known of the second half; that must be said, and how wrong it may be
            known = sum(_truth(name, stubs, t0, start + row.lost_at) for name in row.counts)
            right = error <= cell["u_j"] or abs(joules - known) <= row.tolerance * known
            right = right and states[0].startswith("lost") and cell["coverage"] < 0.6
    elif row.lost_at is not None:
        right = False  # a figure without a word about half of it missing
    cell["said"] = f"{joules:.1f}" + (f" +- {cell['u_j']:.1f}" if "u_j" in cell else "")
    cell["right"] = right
    return cell


def _merge(tool: str, windows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All ranks' figures as the tool lets them be put together: by board where it names boards, else the sum."""
    merged: dict[str, dict[str, Any]] = {}
    for rank, window in enumerate(windows):
        for name, figure in window["figures"].items():
            if name == "all":
                continue  # CodeCarbon's own sum: the boards are there too
            key = figure.get("key") or f"{rank}/{name}"
            if key not in merged or figure.get("coverage", 0.0) > merged[key].get("coverage", 0.0):
                merged[key] = figure
    if tool == "codecarbon":  # what it reports is its own sum, over the boards that it chose
        return {f"{rank}": window["figures"]["all"] for rank, window in enumerate(windows)}
    return merged


def _print(row: dict[str, Any]) -> dict[str, Any]:
    truth = "none" if row["truth_j"] is None else f"{row['truth_j']:.1f}"
    print(f"\n{row['title']} (truth {truth})")
    for tool, cell in row["cells"].items():
        states = f"  [{'; '.join(cell['states'])}]" if cell.get("states") else ""
        print(f"  {'*' if cell['right'] else ' '} {tool:15}{cell['said'][:110]}{states}", flush=True)
    return row


def goals(rows: list[dict[str, Any]]) -> list[tuple[str, bool, str]]:
    """Every row right, and how many of the rows each peer has right."""
    found = [
        (f"fault: {row['title']}", bool(row["cells"]["ours"]["right"]), str(row["cells"]["ours"]["said"]))
        for row in rows
        if "ours" in row["cells"]
    ]
    for peer in sorted({tool for row in rows for tool in row["cells"]} - {"ours"}):
        cells = [row["cells"][peer] for row in rows if peer in row["cells"]]
        print(f"{peer}: {sum(cell['right'] for cell in cells)} of {len(cells)} fault rows right")
    return found
