"""The content of ``energy.json``: everything that a reader needs in order to trust or to doubt the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from lightning_npu.metering.ledger import Account, totals_to_json
from lightning_npu.metering.overlap import Overlap
from lightning_npu.metering.totals import Sum, Totals, add_up

FORMAT = 1
"""Version of the layout of ``energy.json``."""

JOULES_PER_KWH = 3.6e6


def document(
    account: Account,
    *,
    stage: str,
    started_at: float | None,
    ended: str,
    epochs: Sequence[Mapping[str, Any]],
    health: Mapping[str, Any],
    idle_power_w: Mapping[str, Any] | None,
    unmetered: Mapping[str, str],
    overlap: Overlap | None,
    modules: Mapping[str, Any],
    failures: Sequence[Mapping[str, Any]],
    ranks: int,
    ranks_merged: bool,
    earlier: Account,
) -> dict[str, Any]:
    """Plain JSON values; a figure that is not known is null, never 0.

    Args:
        account: energy and work of all ranks, earlier parts of a resumed run included. Energy per sample is that of
            training and waiting for data, or of the one phase where nothing was trained.
        stage: "fit", "validation", "test" or "predict".
        started_at: wall-clock seconds since the epoch, for display.
        ended: "" while it runs, "finished", or why it ended.
        epochs: one entry each.
        health: how well each board of this rank was measured.
        idle_power_w: the baseline of each board; None: there is none.
        unmetered: parts of the run whose energy is in no figure, and why.
        overlap: how well training and accelerator overlapped.
        modules: the frozen modules and what they ran on when the run began.
        failures: devices that failed, and what was used since, by their references too.
        ranks: of the run.
        ranks_merged: whether the figures of all ranks are in it, up to its end.
        earlier: the parts of the run before this one; they are in ``account``, and not in ``epochs``.
    """
    trained = add_up(account.work(stage))
    content: dict[str, Any] = _finite(
        {
            "format": FORMAT,
            "stage": stage,
            "started_at": None if started_at is None else datetime.fromtimestamp(started_at, timezone.utc).isoformat(),
            "ended": ended,
            "ranks": ranks,
            "ranks_merged": ranks_merged,
            "earlier": _earlier(earlier),
            "elapsed_s": account.elapsed_s,
            "samples": account.samples,
            "optimizer_steps": account.steps,
            "total": _sum(add_up(account.totals)),
            "by_kind": {kind: _sum(add_up(account.totals, kind)) for kind in sorted(_kinds(account.totals))},
            "per_sample_j": _per(trained, account.samples),
            "per_sample_uncertainty_j": None
            if trained is None or not account.samples
            else trained.uncertainty_j / account.samples,
            "net_per_sample_j": None
            if trained is None or trained.net_j is None or not account.samples
            else trained.net_j / account.samples,
            "per_optimizer_step_j": _per(trained, account.steps),
            "phases": {
                phase: {"seconds": seconds, **(_sum(add_up(account.phases.get(phase, {}))) or {"energy_j": None})}
                for phase, seconds in account.phase_s.items()
            },
            "epochs": list(epochs),
            "boards": {
                key: {**total, "health": health.get(key)} for key, total in totals_to_json(account.totals).items()
            },
            "idle_power_w": None if idle_power_w is None else dict(idle_power_w),
            "no_power_sensor": dict(unmetered),
            "overlap": None
            if overlap is None
            else {
                "efficiency": overlap.efficiency,
                "train_s": overlap.train_s,
                "npu_s": overlap.npu_s,
                "step_s": overlap.step_s,
            },
            "modules": dict(modules),
            "failures": list(failures),
        }
    )
    return content


def _earlier(account: Account) -> dict[str, Any] | None:
    """What a resumed run goes on from; None where it began here."""
    if not account.elapsed_s:
        return None
    total = add_up(account.totals)
    return {
        "elapsed_s": account.elapsed_s,
        "samples": account.samples,
        "optimizer_steps": account.steps,
        "energy_j": None if total is None else total.energy_j,
    }


def _sum(total: Sum | None) -> dict[str, Any] | None:
    if total is None:
        return None
    return {
        "energy_j": total.energy_j,
        "energy_kwh": total.energy_j / JOULES_PER_KWH,
        "uncertainty_j": total.uncertainty_j,
        "coverage": total.coverage,
        "net_j": total.net_j,
        "mean_power_w": total.mean_power_w,
        "simulated": total.simulated,
        "state": total.state,
    }


def _per(total: Sum | None, count: int) -> float | None:
    return None if total is None or not count else total.energy_j / count


def _kinds(totals: Totals) -> set[str]:
    return {total.kind for total in totals.values()}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: what is not a number is not known."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
