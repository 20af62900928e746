"""What the meter tells W&B beyond rows of numbers: axes, the run's summary, the power trace. Nothing here raises.

Rows themselves go through the logger (``logger.log_metrics(row, step=trainer.global_step)``), which every logger
understands. The functions take a Lightning ``WandbLogger`` of either Lightning package, or a W&B run. Where there is no
run (another rank than 0, ``WANDB_MODE=disabled``) they do nothing. W&B is imported only once a run of it is there.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from lightning_npu import keys

log = logging.getLogger(__name__)

TRACE_COLUMNS = ("time_s", "board", "power_w")
_LOGGER_MODULES = ("lightning.pytorch.loggers.wandb", "pytorch_lightning.loggers.wandb")

Trace = Mapping[str, Sequence[tuple[float, float]]]
_P = ParamSpec("_P")


def wandb_loggers(loggers: Iterable[Any]) -> list[Any]:
    """Those of ``loggers`` that are a ``WandbLogger`` of either Lightning package; imports nothing."""
    modules = (sys.modules.get(name) for name in _LOGGER_MODULES)
    classes = tuple(module.WandbLogger for module in modules if module is not None)
    return [logger for logger in loggers if isinstance(logger, classes)]


def _harmless(function: Callable[Concatenate[_Target, _P], None]) -> Callable[Concatenate[Any, _P], bool]:
    """Call with a target that has a live run; log what goes wrong; True if nothing did."""

    @functools.wraps(function)
    def wrapper(target: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> bool:
        try:
            found = _Target(target)
            if not found.live:
                return False
            function(found, *args, **kwargs)
        except Exception as error:
            log.warning("W&B: %s failed (%s: %s); the run goes on.", function.__name__, type(error).__name__, error)
            log.debug("W&B: %s failed", function.__name__, exc_info=True)
            return False
        return True

    return wrapper


class _Target:
    """A W&B run, and how the names of its metrics begin.

    Args:
        target: a WandbLogger or a run.
    """

    def __init__(self, target: Any) -> None:
        self.logger = target if wandb_loggers([target]) else None
        self.run = target if self.logger is None else self.logger.experiment
        # another rank has Lightning's dummy; a disabled run has no file that anything could go to
        self.live = type(self.run).__module__.split(".")[0] == "wandb" and not getattr(self.run, "disabled", False)
        prefix = getattr(self.logger, "_prefix", "")
        self._prefix = f"{prefix}{self.logger.LOGGER_JOIN_CHAR}" if self.logger is not None and prefix else ""

    def name(self, key: str) -> str:
        """What a metric that is logged through the logger as ``key`` is called in the run."""
        return f"{self._prefix}{key}"

    def log(self, row: dict[str, Any], step: int | None) -> None:
        if self.logger is not None:
            self.logger.log_metrics(row, step=step)
        else:
            self.run.log(row)


@_harmless
def define_metrics(target: _Target, *, prefix: str = keys.PREFIX, metrics: Sequence[str] = ()) -> None:
    """Draw energy and look-ahead over seconds, and the task's metrics over joules.

    Lightning has defined ``*`` over ``trainer/global_step`` before; what is defined here is more specific. Rows need
    not hold the axis: W&B fills in its last value.

    Args:
        target: a ``WandbLogger`` or a W&B run.
        prefix: of the meter's keys.
        metrics: keys of the task's metrics, such as "val/loss"; ``*`` at the end stands for anything.

    Returns:
        False where there is no run, or where W&B failed.
    """
    elapsed_s, total_j = (target.name(keys.with_prefix(key, prefix)) for key in (keys.ELAPSED_S, keys.TOTAL_J))
    define = target.run.define_metric
    define(elapsed_s)
    define(total_j, step_metric=elapsed_s)
    for glob in (prefix, keys.NPU_PREFIX):
        if glob:  # without a prefix it would be everything
            define(target.name(f"{glob}*"), step_metric=elapsed_s)
    for metric in metrics:
        define(target.name(metric), step_metric=total_j)


@_harmless
def write_summary(target: _Target, numbers: Mapping[str, Any]) -> None:
    """Write final numbers into the run's summary, as plain values under their own key.

    To be called after the last row was logged, since a row overwrites the summary of its keys.

    Args:
        target: a ``WandbLogger`` or a W&B run.
        numbers: by key. None and NaN mean unknown: such keys are left out, so that no table shows them as a number.

    Returns:
        False where there is no run, or where W&B failed.
    """
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in numbers.items()}
    known = {key: value for key, value in plain.items() if value is not None and value == value}
    target.run.summary.update({target.name(key): value for key, value in known.items()})


@_harmless
def log_power_trace(
    target: _Target,
    trace: Trace,
    *,
    limit: int = 5000,
    step: int | None = None,
    prefix: str = keys.PREFIX,
    csv_artifact: bool = False,
) -> None:
    """Log power over time as one table: ``time_s``, ``board``, ``power_w``.

    Args:
        target: a ``WandbLogger`` or a W&B run.
        trace: seconds since the start and watts, in time order, by the board's short name.
        limit: rows at most, over all boards; longer traces are averaged over time, which keeps their energy.
        step: ``trainer.global_step``.
        prefix: of the meter's keys.
        csv_artifact: whether to attach the whole trace as an artifact too, a CSV file of the same columns.

    Returns:
        False where there is no run, or where W&B failed.
    """
    traces = {name: points for name, points in trace.items() if points}
    if not traces:
        return
    import wandb

    share = max(1, limit // len(traces))
    rows = [[t, name, w] for name, points in traces.items() for t, w in decimate(points, share)]
    table = wandb.Table(columns=list(TRACE_COLUMNS), data=rows[:limit])
    target.log({keys.with_prefix(keys.POWER_TRACE, prefix): table}, step)
    if csv_artifact:
        artifact = wandb.Artifact(f"power_trace-{target.run.id}", type="power_trace")
        with artifact.new_file("power_trace.csv", encoding="utf-8") as file:
            file.write(trace_csv(traces))
        target.run.log_artifact(artifact)


def trace_csv(trace: Trace) -> str:
    """The trace as CSV, under a header, board by board."""
    text = io.StringIO()
    text.write(",".join(TRACE_COLUMNS) + "\n")
    for name, points in trace.items():
        text.writelines(f"{time_s:.6f},{name},{power_w:.6g}\n" for time_s, power_w in points)
    return text.getvalue()


def decimate(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most ``limit`` points; neighbours become one at their mean time and mean power, weighted by the time of each.

    Args:
        points: seconds and watts, in time order.
        limit: 1 or more.
    """
    if len(points) <= limit:
        return list(points)
    times = [time_s for time_s, _ in points]
    edges = [times[0], *((a + b) / 2 for a, b in itertools.pairwise(times)), times[-1]]
    weights = [b - a for a, b in itertools.pairwise(edges)]
    size = math.ceil(len(points) / limit)
    bins: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = slice(start, start + size)
        span_s = sum(weights[part])
        scale = [w / span_s for w in weights[part]] if span_s > 0 else [1 / len(weights[part])] * len(weights[part])
        time_s = sum(s * t for s, t in zip(scale, times[part], strict=True))
        bins.append((time_s, sum(s * w for s, (_, w) in zip(scale, points[part], strict=True))))
    return bins
