"""The W&B dashboard of a metered run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from lightning_npu import keys
from lightning_npu.errors import NPUError


def wandb_workspace(
    entity: str,
    project: str,
    *,
    name: str = "Energy",
    prefix: str = keys.PREFIX,
    metric: str | Sequence[str] = "val/loss",
    boards: Sequence[str] | None = None,
) -> Any:
    """Build the dashboard of what :class:`lightning_npu.EnergyMeter` logs.

    Power stacked by board, joules per sample, the task's metric over joules, energy by phase, how well the NPU's work
    is hidden, and how far the meter can be trusted. Nothing is sent until ``.save()``, which needs to be logged in:

        workspace = lightning_npu.wandb_workspace("my-team", "robot")
        workspace.save()

    Args:
        entity: user or team.
        project: the project of the runs.
        name: what the dashboard is called.
        prefix: of the meter's keys, if it was changed.
        metric: what the task is judged by, one or more logged keys; drawn over joules.
        boards: short names of the boards to stack, in that order ("gpu0", "npu0"); default: all that a run logs.

    Returns:
        a ``wandb_workspaces.workspaces.Workspace``, to change or to ``.save()``.

    Raises:
        NPUError: the package ``wandb-workspaces`` is not installed.
    """
    ws, wr = _packages()
    metrics = [metric] if isinstance(metric, str) else list(metric)
    panels = _Panels(wr, prefix)
    sections = [
        ("Energy", panels.energy()),
        ("Board power", panels.power(boards)),
        ("Task over joules", panels.task(metrics)),
        ("Phases", panels.phases()),
        ("NPU overlap", panels.overlap()),
        ("Meter health", panels.health()),
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        auto_generate_panels=False,
        sections=[
            ws.Section(
                name=title, panels=content, is_open=True, layout_settings=ws.SectionLayoutSettings(columns=2, rows=2)
            )
            for title, content in sections
        ],
    )


def workspace_json(workspace: Any) -> str:
    """The JSON of a workspace, as W&B stores it; works without network and login.

    Args:
        workspace: of :func:`wandb_workspace`.
    """
    spec = workspace._to_model().spec  # the package has no public way to it
    return str(spec.model_dump_json(by_alias=True, exclude_none=True))


def _packages() -> tuple[Any, Any]:
    try:
        workspaces = importlib.import_module("wandb_workspaces.workspaces")
        return workspaces, importlib.import_module("wandb_workspaces.reports.v2")
    except ImportError as error:
        raise NPUError(
            "The W&B dashboard needs a package that is not installed.",
            expected="wandb-workspaces 0.4.4 or newer",
            got=str(error),
            remedy="pip install 'lightning-npu[wandb]'",
        ) from error


class _Panels:
    """Makes the panels; every key goes through the prefix.

    Args:
        wr: the module ``wandb_workspaces.reports.v2``.
        prefix: of the meter's keys.
    """

    def __init__(self, wr: Any, prefix: str) -> None:
        self._wr = wr
        self._prefix = prefix

    def energy(self) -> list[Any]:
        return [
            self._scalar("Energy of all boards (J)", keys.TOTAL_J),
            self._scalar("Joules per sample", keys.PER_SAMPLE_J),
            self._line("Energy by kind (J)", [keys.kind_j(kind) for kind in keys.KINDS], stacked=True),
            self._line("Joules per sample", [keys.PER_SAMPLE_J, keys.NET_PER_SAMPLE_J], smooth=True),
            self._line("Joules per step", [keys.STEP_J, keys.PER_OPTIMIZER_STEP_J], smooth=True),
            self._line("Joules per epoch", [keys.EPOCH_J]),
        ]

    def power(self, boards: Sequence[str] | None) -> list[Any]:
        stacked = self._family("Board power, stacked (W)", keys.board_power_w("NAME"), boards, stacked=True)
        by_kind = [keys.BOARD_POWER_W, *(keys.kind_power_w(kind) for kind in keys.KINDS)]
        return [
            stacked,
            self._line("Combined board power (W)", by_kind),
            self._line("Peak GPU memory (bytes)", [keys.GPU_MEMORY_PEAK_BYTES]),
        ]

    def task(self, metrics: Sequence[str]) -> list[Any]:
        x = self._key(keys.TOTAL_J)
        over = [self._wr.LinePlot(title=f"{key} over joules", x=x, y=[key], title_x="J") for key in metrics]
        summary = self._wr.SummaryMetric
        across = [
            self._wr.ScatterPlot(title=f"{key} against joules, all runs", x=summary(x), y=summary(key))
            for key in metrics
        ]
        return [*over, *across]

    def phases(self) -> list[Any]:
        phases = [self._key(keys.phase_j(phase)) for phase in keys.PHASES]
        bars = self._wr.BarPlot(title="Energy by phase (J)", metrics=phases, orientation="h", title_x="J")
        return [bars, self._line("Energy by phase (J)", map(keys.phase_j, keys.PHASES), stacked=True)]

    def overlap(self) -> list[Any]:
        return [
            self._line("Overlap efficiency (1.0 is the limit)", [keys.OVERLAP_EFFICIENCY]),
            self._line("Seconds waited for the NPU", [keys.WAIT_S]),
            self._line("Share of calls answered ahead of time", [keys.HIT_RATE]),
            self._line("Batches requested ahead", [keys.QUEUE_DEPTH]),
            self._family("Calls computed on the spot, by cause", keys.misses("NAME"), None),
        ]

    def health(self) -> list[Any]:
        return [
            self._line("Share of time with fresh readings", [keys.COVERAGE]),
            self._line("Uncertainty of the total (J)", [keys.UNCERTAINTY_J]),
            self._family("Counter over integrated power (1.0: they agree)", keys.board_counter_ratio("NAME"), None),
        ]

    def _key(self, key: str) -> str:
        return keys.with_prefix(key, self._prefix)

    def _line(self, title: str, names: Any, *, stacked: bool = False, smooth: bool = False) -> Any:
        return self._wr.LinePlot(
            title=title, y=[self._key(name) for name in names], **self._over_time(stacked=stacked, smooth=smooth)
        )

    def _family(self, title: str, key: str, names: Sequence[str] | None, *, stacked: bool = False) -> Any:
        """All keys that differ in NAME, or those of ``names``."""
        key, over_time = self._key(key), self._over_time(stacked=stacked)
        if names is not None:
            return self._wr.LinePlot(title=title, y=[key.replace("NAME", name) for name in names], **over_time)
        pattern = re.escape(key).replace("NAME", "[^/]+").replace(r"\-", "-")
        return self._wr.LinePlot(title=title, metric_regex=f"^{pattern}$", **over_time)

    def _over_time(self, *, stacked: bool = False, smooth: bool = False) -> dict[str, Any]:
        options: dict[str, Any] = {"x": self._key(keys.ELAPSED_S), "title_x": "s"}
        if stacked:  # the areas of several runs would lie on top of one another
            options |= {"plot_type": "stacked-area", "max_runs_to_show": 1}
        if smooth:
            options |= {"smoothing_type": "exponentialTimeWeighted", "smoothing_factor": 0.6}
        return options

    def _scalar(self, title: str, key: str) -> Any:
        return self._wr.ScalarChart(title=title, metric=self._key(key))
