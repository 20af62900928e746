"""What all ranks of a run used, earlier parts of a resumed run included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_npu.metering.ranks import gather
from lightning_npu.metering.recorder import TRAINING, Recorder
from lightning_npu.metering.stretches import Snapshot
from lightning_npu.metering.totals import BoardTotal, Totals, merge, then


@dataclass(frozen=True)
class Account:
    """Energy and what was done for it.

    Attributes:
        totals: of each board.
        phases: of each board in each phase.
        phase_s: seconds of each phase.
        samples: trained by all ranks.
        steps: optimizer steps.
        elapsed_s: seconds.
    """

    totals: Totals = field(default_factory=dict)
    phases: dict[str, Totals] = field(default_factory=dict)
    phase_s: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    steps: int = 0
    elapsed_s: float = 0.0

    def then(self, later: Account) -> Account:
        """This part of a run and the one after it."""
        return Account(
            then(self.totals, later.totals),
            {
                phase: then(self.phases.get(phase, {}), later.phases.get(phase, {}))
                for phase in dict.fromkeys((*self.phases, *later.phases))
            },
            {
                phase: self.phase_s.get(phase, 0.0) + later.phase_s.get(phase, 0.0)
                for phase in dict.fromkeys((*self.phase_s, *later.phase_s))
            },
            self.samples + later.samples,
            self.steps + later.steps,
            self.elapsed_s + later.elapsed_s,
        )

    def work(self, stage: str) -> Totals:
        """What samples and steps cost: training and waiting for data, or the one phase of an evaluation by itself."""
        spent: Totals = {}
        for phase in TRAINING if stage == "fit" else (stage,):
            spent = then(spent, self.phases.get(phase, {}))
        return spent

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "totals": totals_to_json(self.totals),
            "phases": {phase: totals_to_json(totals) for phase, totals in self.phases.items()},
            "phase_s": dict(self.phase_s),
            "samples": self.samples,
            "steps": self.steps,
            "elapsed_s": self.elapsed_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Account:
        """The reverse of :meth:`to_json`.

        Raises:
            Exception: it is something else.
        """
        return cls(
            totals_from_json(data["totals"]),
            {phase: totals_from_json(totals) for phase, totals in data["phases"].items()},
            {phase: float(seconds) for phase, seconds in data["phase_s"].items()},
            int(data["samples"]),
            int(data["steps"]),
            float(data["elapsed_s"]),
        )


def totals_to_json(totals: Totals) -> dict[str, Any]:
    """Plain values, by board."""
    return {key: total.to_json() for key, total in totals.items()}


def totals_from_json(data: Mapping[str, Any]) -> Totals:
    """The reverse of :func:`totals_to_json`."""
    return {key: BoardTotal.from_json(total) for key, total in data.items()}


@dataclass(frozen=True)
class MergedEpoch:
    """An epoch of all ranks: as :class:`lightning_npu.metering.recorder.Epoch`."""

    whole: Totals
    training: Totals
    samples: int
    steps: int
    duration_s: float


class Ledger:
    """Merges what the ranks record, by board.

    Args:
        recorder: of this rank.
        prior: of an earlier part of the run, which all ranks know.
        ranks_here: ranks on this host.
        problems: why power sources have no boards on this rank, by name.

    Attributes:
        prior: as given.
        epoch: of all ranks, as of the last :meth:`merge`.
        problems: of all ranks, likewise.
        failures: gives the devices that failed on this rank.
        all_failures: of all ranks, as of the last :meth:`merge`.
        ranks_merged: how many ranks the last :meth:`merge` heard of.
    """

    def __init__(self, recorder: Recorder, prior: Account, ranks_here: int, problems: Mapping[str, str]) -> None:
        self.recorder, self.prior, self._ranks_here = recorder, prior, ranks_here
        self._others = Account()
        self._samples_elsewhere = self._samples_merged = 0  # of other ranks, and of this one, at the last merge
        self._given_problems = dict(problems)
        self.steps_before = recorder.steps
        self.epoch: MergedEpoch | None = None
        self.problems = dict(problems)
        self.failures: Callable[[], list[dict[str, Any]]] = list
        self.all_failures: list[dict[str, Any]] = []
        self.ranks_merged = 1

    def merge(self) -> None:
        """Learn what the other ranks saw so far. All ranks come here, at the same point of the run."""
        recorder = self.recorder
        epoch = recorder.epoch()
        mine: dict[str, Any] = {
            "account": self._mine().to_json(),
            "problems": {**self._given_problems, **recorder.monitor.problems},
            "failures": self.failures(),
            "epoch": None,
        }
        if epoch is not None:
            mine["epoch"] = {
                "whole": totals_to_json(epoch.whole),
                "training": totals_to_json(epoch.training),
                "samples": epoch.samples,
                "steps": epoch.steps,
                "duration_s": epoch.duration_s,
            }
        everyone = gather(mine)
        accounts = [Account.from_json(rank["account"]) for rank in everyone]
        totals = merge(account.totals for account in accounts)
        phases = {
            phase: merge(account.phases.get(phase, {}) for account in accounts)
            for phase in dict.fromkeys(phase for account in accounts for phase in account.phases)
        }
        self._others = Account(totals, phases)
        self._samples_merged = recorder.samples
        self._samples_elsewhere = sum(account.samples for account in accounts) - recorder.samples
        self.ranks_merged = len(everyone)
        self.all_failures = [failure for rank in everyone for failure in rank["failures"]]
        self.problems = {name: reason for rank in everyone for name, reason in rank["problems"].items()}
        epochs = [rank["epoch"] for rank in everyone if rank["epoch"] is not None]
        if epochs:
            self.epoch = MergedEpoch(
                merge(totals_from_json(one["whole"]) for one in epochs),
                merge(totals_from_json(one["training"]) for one in epochs),
                sum(one["samples"] for one in epochs),
                max(one["steps"] for one in epochs),
                max(one["duration_s"] for one in epochs),
            )

    @property
    def account(self) -> Account:
        """Everything that this rank knows: what it reads itself as of now, the rest as of the last :meth:`merge`.

        Under several ranks, the first of a host reads all boards of the host that it can open; between merges it takes
        the other ranks of its host to have trained as many samples as itself.
        """
        return self._with_others(self._mine())

    @property
    def account_settled(self) -> Account:
        """The same, with phases up to where later readings change nothing: cheaper, for figures on the way."""
        recorder = self.recorder
        return self._with_others(
            self._of(Snapshot(recorder.totals, recorder.by_phase, recorder.phase_s, recorder.elapsed_s))
        )

    def _with_others(self, mine: Account) -> Account:
        totals = {**self._others.totals, **mine.totals}
        phases = {
            phase: {**self._others.phases.get(phase, {}), **mine.phases.get(phase, {})}
            for phase in dict.fromkeys((*self._others.phases, *mine.phases))
        }
        since = mine.samples - self._samples_merged
        elsewhere = self._samples_elsewhere + since * (self._ranks_here - 1)
        return self.prior.then(replace(mine, totals=totals, phases=phases, samples=mine.samples + elsewhere))

    def _mine(self) -> Account:
        return self._of(self.recorder.snapshot())

    def _of(self, snapshot: Snapshot) -> Account:
        recorder = self.recorder
        steps = max(0, recorder.steps - self.steps_before)
        totals, by_phase, phase_s, elapsed_s = snapshot
        return Account(totals, by_phase, phase_s, recorder.samples, steps, elapsed_s)
