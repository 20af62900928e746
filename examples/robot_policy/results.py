"""Result files of the runs, and the table over them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intervals import over_trainings, paired_difference, wilson


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version()}


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All ``result.json`` below ``folder``, in the order of their conditions."""
    order = ("none", "L0", "L1", "L2", "L3", "L4")
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]
    keys = ("task", "demos", "steps", "episode_seeds", "seed")
    return sorted(found, key=lambda r: ([r[key] for key in keys], r["encoder"] != "stage1", order.index(r["offload"])))


def label(result: dict[str, Any]) -> str:
    """The condition's name in tables."""
    name = "FP32 in torch" if result["offload"] == "none" else f"{result['offload']} INT8"
    if "balance" in result:
        name += f", balance {result['balance']}"
    for failure in result.get("device_failures", ()):
        name += f", FP32 for the last {failure['samples_since']} samples: the device failed"
    return name if result["encoder"] == "stage1" else f"{name}, random encoder"


def baseline_of(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The run that differs from ``result`` in its encoder's execution or weights alone: trained, FP32 in torch."""
    for other in results:
        if (other["offload"], other["encoder"]) != ("none", "stage1") or other is result:
            continue
        if all(other[key] == result[key] for key in ("task", "seed", "steps", "demos", "episode_seeds")):
            return other
    return None


def joules(energy: dict[str, Any] | None) -> str:
    """Energy per sample with its uncertainty; what was not measured is never 0."""
    if energy is None:
        return "not metered"
    if energy["per_sample_j"] is None:
        return "no power sensor"
    simulated = " simulated" if energy["total"]["simulated"] else ""
    return f"{energy['per_sample_j']:.3g} +- {energy['per_sample_uncertainty_j']:.2g}{simulated}"


def why_no_energy(results: Sequence[dict[str, Any]]) -> str:
    """Which boards could not be metered, and why: a line each, or nothing."""
    reasons = {
        f"{name}: {reason}"
        for result in results
        for name, reason in (result.get("energy") or {}).get("no_power_sensor", {}).items()
    }
    return "".join(f"\nno power sensor, {reason}" for reason in sorted(reasons))


def percent(value: float, signed: bool = False) -> str:
    """0.953 as "95.3"."""
    return f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one row a run, differences paired over the same environment seeds."""
    rows = [
        (
            *("task", "demos", "steps", "seed", "encoder", "episodes", "success", "95 %", "difference to FP32"),
            *("samples/s", "training s", "CPU s", "J/sample", "worst SQNR dB"),
        )
    ]
    for result in results:
        solved = result["solved"]
        low, high = wilson(sum(solved), len(solved))
        baseline = baseline_of(result, results)
        difference = ""
        if baseline is not None:
            value, (least, most) = paired_difference(solved, baseline["solved"])
            difference = f"{percent(value, True)} [{percent(least, True)}, {percent(most, True)}]"
        worst = min((f["sqnr_db"] for f in result["fidelity"].values()), default=None)
        rows.append(
            (
                result["task"],
                str(result["demos"]),
                str(result["steps"]),
                str(result["seed"]),
                label(result),
                f"from {result['episode_seeds'][0]}",
                f"{sum(solved)}/{len(solved)} = {percent(sum(solved) / len(solved))} %",
                f"{percent(low)}-{percent(high)}",
                difference,
                f"{result['samples_per_s']:.0f}",
                f"{result['training_s']:.0f}",
                f"{result['training_cpu_s']:.0f}",
                joules(result.get("energy")),
                "" if worst is None else f"{worst:.1f}",
            )
        )
    return _markdown(rows)


def table_over_seeds(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one row a condition that was trained with several seeds; empty where none was.

    A difference is that of each training to the FP32 training of the same seed, over the same environment seeds.
    """
    rows = [("task", "demos", "steps", "encoder", "trainings", "success", "lowest", "difference to FP32", "CPU s")]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        settings = (result["task"], result["demos"], result["steps"], *result["episode_seeds"])
        groups.setdefault((*settings, label(result)), []).append(result)
    for (task, demos, steps, *_, name), group in groups.items():
        if len({result["seed"] for result in group}) < 2:
            continue
        rates = [sum(result["solved"]) / len(result["solved"]) for result in group]
        pairs = [
            (rate, baseline) for rate, r in zip(rates, group, strict=True) if (baseline := baseline_of(r, results))
        ]
        difference = ""
        if len(pairs) > 1:
            apart = [rate - sum(baseline["solved"]) / len(baseline["solved"]) for rate, baseline in pairs]
            value, (least, most) = over_trainings(apart)
            difference = f"{percent(value, True)} [{percent(least, True)}, {percent(most, True)}]"
        cpu_s = sum(result["training_cpu_s"] for result in group) / len(group)
        rates_text = (f"{percent(sum(rates) / len(rates))} %", f"{percent(min(rates))} %")
        rows.append((task, str(demos), str(steps), name, str(len(group)), *rates_text, difference, f"{cpu_s:.0f}"))
    return _markdown(rows) if len(rows) > 1 else ""


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


NOTE = (
    "success with Wilson's interval; difference in points over the same environment seeds, with Newcombe's interval "
    "for paired proportions (method 10)"
)
NOTE_OVER_SEEDS = (
    "means over training seeds; difference in points to the FP32 training of the same seed, with Student's interval "
    "over trainings"
)
