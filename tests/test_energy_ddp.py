"""Several ranks: a board counts once, samples of all ranks are counted, and decisions agree."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from meter_parts import Model, Truth, loader

import lightning_npu as npu
from lightning_npu import keys
from lightning_npu.metering.ledger import Account, Ledger
from lightning_npu.metering.ranks import divide
from lightning_npu.metering.recorder import Recorder
from lightning_npu.power.monitor import EnergyMonitor
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
WATTS = {"a": 40.0, "b": 25.0, "shared": 60.0}
CASES = {  # the boards that each rank uses
    "one board": (["shared"], ["shared"]),
    "two boards": (["a"], ["b"]),
    "two and a shared one": (["a", "shared"], ["shared", "b"]),
    "one rank without": ([], ["b"]),
    "the other without": (["a"], []),
    "none": ([], []),
}


def source_of(names: list[str], **options: Any) -> list[SimulatedSource]:
    settings = {"counter": True, **options}
    boards = [SimulatedBoard(WATTS[name], name=name, kind="npu", **settings) for name in names]
    return [SimulatedSource(boards, start_s=0.0)] if boards else []


def launch(tmp_path: Path, role: str, *arguments: str, fails: bool = False) -> list[Any]:
    """Run this file as two ranks; what each of them wrote."""
    store = tmp_path / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, role, str(rank), str(store), str(tmp_path), *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    if not fails:
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    written = [tmp_path / f"out{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) if path.exists() else None for path in written]


# --- the parts, driven directly


def drive(rank: int, folder: Path) -> None:
    """All cases one after the other in one process group: starting Python is what takes time."""
    results: dict[str, Any] = {}
    for case, names in CASES.items():
        sources, problems = divide(source_of(names[rank]))
        recorder = Recorder(EnergyMonitor(sources))
        recorder.start(quietly=not sources)
        assert recorder._whole is not None
        prior = Account(samples=1000, steps=100)
        ledger = Ledger(recorder, prior, 2, problems)
        recorder.begin_epoch()
        for step in range(4):
            recorder.phases.switch("train")
            time.sleep(0.01 * (1 + rank))
            recorder.step_done(3 + rank, step + 1)
        recorder.end_epoch()
        ledger.merge()
        between = ledger.account
        recorder.stop()
        ledger.merge()
        account, epoch = ledger.account, ledger.epoch
        assert epoch is not None
        results[case] = {
            "reads": sorted(board.key.rpartition("-")[2] for board in recorder.monitor.boards),
            "window": [recorder._whole.started_s, recorder._whole.ended_s],
            "totals": {key.rpartition("-")[2]: total.to_json() for key, total in account.totals.items()},
            "phases": sum(t.energy_j for totals in account.phases.values() for t in totals.values()),
            "samples": [between.samples, account.samples, epoch.samples],
            "steps": [account.steps, epoch.steps],
            "epoch": {key.rpartition("-")[2]: total.energy_j for key, total in epoch.training.items()},
        }
    (folder / f"out{rank}.json").write_text(json.dumps(results))


def test_boards_count_once_and_samples_add_up(tmp_path):
    first, second = launch(tmp_path, "drive")
    for case, names in CASES.items():
        one, two = first[case], second[case]
        used = sorted(set(names[0]) | set(names[1]))
        assert sorted(one["reads"] + two["reads"]) == used, "each board is read by one rank"
        assert one["reads"] == used, "the first rank of a host reads all that it can"
        for result in (one, two):
            assert sorted(result["totals"]) == used, case
            assert result["samples"] == [1000 + 12 + 16, 1000 + 12 + 16, 12 + 16]
            assert result["steps"] == [104, 4]
        start_s, end_s = one["window"]
        for name in used:
            total = one["totals"][name]
            assert abs(total["energy_j"] - WATTS[name] * (end_s - start_s)) <= total["uncertainty_j"]
        assert one["phases"] == pytest.approx(sum(total["energy_j"] for total in one["totals"].values()), rel=1e-6)
        assert one["epoch"] == two["epoch"]
        assert sorted(one["epoch"]) == used


# --- trainings


class Keep(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Failing(Model):
    """Its second rank may die in the second epoch."""

    def __init__(self, fails: bool) -> None:
        super().__init__(step_s=0.01)
        self.fails = fails

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fails and self.trainer.current_epoch == 1 and index == 2 and self.trainer.global_rank == 1:
            raise RuntimeError("this rank dies")
        return super().training_step(batch, index)


def train(rank: int, folder: Path, case: str, *, fails: bool) -> None:
    """One rank of a training with two."""
    keep = Keep()
    logging.getLogger("lightning_npu").addHandler(keep)
    energy = npu.EnergyMeter(sources=source_of(CASES[case][rank]), rolling_s=0.05)
    # joules grow from epoch to epoch, so that it stops after two more epochs, on all ranks or on none
    stop = EarlyStopping(keys.TOTAL_J, mode="min", patience=2)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2 if case == "none" else 9,
        log_every_n_steps=2,
        logger=pl.loggers.CSVLogger(folder / case, name="logs", version=0),
        callbacks=[energy] if case == "none" else [energy, stop],
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        truth = Truth(patch)
        try:
            trainer.fit(Failing(fails), loader(48), loader(8))
        finally:
            logging.getLogger("lightning_npu").removeHandler(keep)
            result = {
                "epochs": trainer.current_epoch,
                "window": truth.windows[-1],
                "report": energy.report,
                "path": str(energy.path),
                "messages": keep.messages,
                "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            }
            out = folder / f"out{rank}.json"
            written = json.loads(out.read_text()) if out.exists() else {}
            out.write_text(json.dumps(written | {case: result}))


@pytest.fixture(autouse=True)
def _free_port(monkeypatch):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PORT", str(found.getsockname()[1]))


def test_two_ranks_train(tmp_path):
    cases = ("two and a shared one", "one rank without", "none")
    ranks = launch(tmp_path, "train", *cases)
    for case in cases:
        _check_training(tmp_path / case / "logs/version_0", case, ranks[0][case], ranks[1][case])


def _check_training(folder: Path, case: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    used = set(CASES[case][0]) | set(CASES[case][1])
    report = first["report"]
    assert report["ranks_merged"]
    assert report["ended"] == "finished"
    epochs = 3 if used else 2
    assert first["epochs"] == second["epochs"] == epochs, "both ranks decide alike"
    assert report["samples"] == 48 * epochs
    assert report["optimizer_steps"] == 6 * epochs
    assert second["path"] == "None", "the first rank's file has it all"
    warnings = [message for result in (first, second) for message in result["messages"]]
    if not used:
        assert report["total"] is None
        assert len(warnings) == 1, warnings
        return
    assert not warnings
    watts = sum(WATTS[name] for name in used)
    start_s, end_s = first["window"]
    total = report["total"]
    assert len(report["boards"]) == len(used)
    assert abs(total["energy_j"] - watts * (end_s - start_s)) <= total["uncertainty_j"]
    both = [key for key in first["metrics"] if key.startswith("energy/")]
    assert keys.PER_SAMPLE_J in both
    assert {key: first["metrics"][key] for key in both} == {key: second["metrics"][key] for key in both}
    assert keys.STEP_J in (folder / "metrics.csv").read_text()
    assert sorted(path.name for path in folder.glob("energy*")) == ["energy.json"]


def test_a_rank_that_dies_leaves_a_file_and_so_does_the_other(tmp_path):
    case = "two and a shared one"
    first, second = launch(tmp_path, "fail", case, fails=True)
    died = second[case]
    assert died["report"]["ended"] == "RuntimeError: this rank dies"
    assert not died["report"]["ranks_merged"]
    assert died["path"].endswith("energy-rank1.json")
    assert json.loads(Path(died["path"]).read_text())["samples"] == 48 + 2 * 4 * 2  # of the other rank it takes as many
    report = json.loads((tmp_path / case / "logs/version_0/energy.json").read_text())
    assert report["samples"] >= 48
    assert report["total"]["energy_j"] > 0
    assert first is None or not first[case]["report"]["ranks_merged"]


if __name__ == "__main__":
    role, rank_text, store, folder_text, *cases = sys.argv[1:]
    if role == "drive":
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank_text), world_size=2)
        drive(int(rank_text), Path(folder_text))
    else:
        os.environ.update(LOCAL_RANK=rank_text, NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
        for case in cases:
            train(int(rank_text), Path(folder_text), case, fails=role == "fail")
    dist.destroy_process_group()
