"""The parts of the meter by themselves: phases, totals, files, ranks, and what W&B keeps of a run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meter_parts import GPU, Model, boards, loader, make_trainer, meter, read_report, total_j

from lightning_npu import keys
from lightning_npu.metering import files, values
from lightning_npu.metering.document import document
from lightning_npu.metering.files import RunFiles, write_json
from lightning_npu.metering.ledger import Account
from lightning_npu.metering.phases import Phases, Span, bundle
from lightning_npu.metering.ranks import OneBoard, divide, make, unused_name
from lightning_npu.metering.recorder import Recorder
from lightning_npu.metering.sources import Sensors
from lightning_npu.metering.totals import BoardTotal, add_up, merge, then, without
from lightning_npu.metering.trainer import samples_of
from lightning_npu.power.monitor import EnergyMonitor
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource
from lightning_npu.power.trace_file import read_trace

# --- phases


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


MOVES = st.lists(
    st.tuples(st.sampled_from(["switch", "enter", "leave", "take"]), st.sampled_from("abc"), st.floats(0, 3)),
    max_size=40,
)


@given(MOVES)
def test_spans_cover_all_of_the_time_once(moves):
    clock = Clock()
    phases, taken = Phases(clock), []
    for move, phase, seconds in moves:
        clock.now_s += seconds
        if move == "take":
            some = phases.take(clock.now_s - 1.0)
            phases.put_back(some[1:])
            taken += some[:1]
        elif move == "leave":
            phases.leave()
        else:
            getattr(phases, move)(phase)
    clock.now_s += 1.0
    phases.stop(clock.now_s)
    spans = [*taken, *phases.take(math.inf)]
    assert spans[0].start_s == 100.0
    assert spans[-1].end_s == clock.now_s
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans))
    for phase, seconds in phases.seconds.items():
        assert seconds == pytest.approx(sum(s.end_s - s.start_s for s in spans if s.phase == phase))


def test_a_phase_goes_back_to_what_it_interrupted():
    clock = Clock()
    phases = Phases(clock)
    phases.switch("train")
    for phase in ("validation", "checkpoint"):
        clock.now_s += 1
        phases.enter(phase)
    for expected in ("validation", "train", "train"):
        phases.leave()
        assert phases.current == expected


def test_spans_that_nobody_takes_are_bounded():
    clock = Clock()
    phases = Phases(clock, limit=8)
    for number in range(100):
        clock.now_s += 1.0
        phases.switch("ab"[number % 2])
    spans = phases.take(math.inf)
    assert len(spans) <= 8
    assert (spans[0].start_s, spans[-1].end_s) == (100.0, clock.now_s)


@given(st.lists(st.tuples(st.sampled_from("tdv"), st.floats(0.001, 0.05)), min_size=1, max_size=60))
def test_bundles_are_short_and_hold_all(parts):
    spans, now_s = [], 0.0
    for phase, seconds in parts:
        spans.append(Span(phase, now_s, now_s + seconds))
        now_s += seconds
    bundles = list(bundle(spans, "td", 0.03))
    assert [span for bundled in bundles for span in bundled] == spans
    for bundled in bundles:
        if len(bundled) > 1:
            assert bundled[-1].end_s - bundled[0].start_s <= 0.03
            assert {span.phase for span in bundled} <= {"t", "d"}


# --- totals


def a_total(energy_j: float = 10.0, **changes: Any) -> BoardTotal:
    plain = BoardTotal("npu", "any", 0, True, energy_j, 0.5, 0.1, 0.2, 2.0, 1.5, 9.0, "counter", "ok", 4.0)
    return replace(plain, **changes)


NUMBER = st.floats(0, 1e6)
TOTALS = st.builds(a_total, NUMBER, gain_j=NUMBER, resolution_j=NUMBER, gap_j=NUMBER, duration_s=st.floats(0.1, 1e5))


@given(TOTALS, TOTALS, st.floats(0, 1))
def test_totals_add_up_and_come_apart(first, second, share):
    both = then({"a": first}, {"a": second, "b": second})
    assert both["a"].energy_j == first.energy_j + second.energy_j
    assert both["a"].gain_j == first.gain_j + second.gain_j
    assert both["a"].resolution_j <= first.resolution_j + second.resolution_j + 1e-6
    assert without(both, {"a": first})["a"].energy_j == pytest.approx(second.energy_j, abs=1e-6)
    part, rest = first.part(share), first.part(1.0 - share)
    assert part.energy_j + rest.energy_j == pytest.approx(first.energy_j)
    assert part.duration_s + rest.duration_s == pytest.approx(first.duration_s)
    assert BoardTotal.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_a_board_counts_once_as_who_saw_most_of_it():
    seen, missed = a_total(10.0), a_total(7.0, covered_s=0.5)
    assert merge([{"a": missed}, {"a": seen}, {"a": missed}]) == {"a": seen}
    total = add_up({"a": seen, "b": missed})
    assert total is not None
    assert (total.energy_j, total.net_j, total.coverage) == (17.0, 9.0, 0.25)
    assert add_up({}) is None
    assert add_up({"a": seen}, "gpu") is None
    unknown = add_up({"a": seen, "b": replace(missed, idle_j=None, state="lost: gone")})
    assert unknown is not None
    assert (unknown.net_j, unknown.state) == (None, "lost: gone")


def test_an_account_survives_json():
    account = Account({"a": a_total()}, {"train": {"a": a_total(4.0)}}, {"train": 1.5}, 8, 2, 2.0)
    assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account
    twice = account.then(account)
    assert (twice.samples, twice.steps, twice.elapsed_s, twice.totals["a"].energy_j) == (16, 4, 4.0, 20.0)
    later = Account({"a": replace(a_total(), state="bent: of a later version")})
    assert account.then(later).totals["a"].state == "bent: of a later version"


# --- the recorder


def test_a_sensor_that_hangs_does_not_hold_up_the_others(monkeypatch):
    """Its spans are accounted for after a while as they are known by then."""
    from lightning_npu.metering import recorder as module

    monkeypatch.setattr(module, "SETTLE_S", 0.05)

    class Hanging(SimulatedSource):
        calls = 0

        def read(self, board, *, power=True):
            self.calls += 1
            reading = super().read(board, power=power)
            return reading if self.calls < 3 else replace(reading, power_w=None, energy_j=None, problem="hangs")

    hanging = Hanging([SimulatedBoard(20.0, name="slow", counter=True)])
    recorder = Recorder(EnergyMonitor([boards(), hanging], interval_s=0.005))
    recorder.start()
    for step in range(10):
        recorder.phases.switch("train")
        until_s = time.monotonic() + 0.03
        while time.monotonic() < until_s:
            time.sleep(0.001)
        recorder.step_done(1, step)
        recorder.fold()
    assert recorder.by_phase["train"]
    assert len(recorder.phases.waiting()) < 10
    recorder.stop()


@pytest.mark.parametrize("batches", [1, 40])
def test_a_validation_may_take_longer_than_detail_is_kept(monkeypatch, batches):
    """Its edges stay exact, and the steps around it cost what they cost; with one long hook or with many batches."""
    for name, value in (
        ("power.session.KEEP_S", 0.2),
        ("power.sampling.UPKEEP_S", 0.02),
        ("power.series.PAST_KNOTS", 8),
        ("metering.recorder.FOLD_S", 0.05),
    ):
        monkeypatch.setattr(f"lightning_npu.{name}", value)

    class Device:
        watts, total_j, since_s = 400.0, 0.0, time.monotonic()

        def power_w(self):
            return self.watts

        def energy_j(self):
            now_s = time.monotonic()
            self.total_j, self.since_s = self.total_j + self.watts * (now_s - self.since_s), now_s
            return self.total_j

        def draw(self, watts):
            self.energy_j()
            self.watts = watts

    device = Device()
    source = SimulatedSource([SimulatedBoard(device, kind="gpu", counter=True)])
    recorder = Recorder(EnergyMonitor([source], interval_s=0.002), rolling_s=0.1)
    recorder.start()
    for _ in range(2):
        for step in range(50):
            recorder.phases.switch("train")
            time.sleep(0.01)  # the work
            recorder.step_done(4, step)
        recorder.interrupt("validation")
        device.draw(50.0)
        for _ in range(batches):
            time.sleep(1.0 / batches)  # the work
            recorder.evaluated(0)
        recorder.resume()
        device.draw(400.0)
        rolling = recorder.rolling()
        steps_j = sum(total.energy_j for total in rolling.by_board.values())
        assert steps_j == pytest.approx(400.0 * rolling.duration_s, rel=0.2)  # the rest is for a busy machine
    recorder.stop()
    seconds, (validation,) = recorder.phase_s["validation"], recorder.by_phase["validation"].values()
    assert validation.energy_j == pytest.approx(50.0 * seconds, rel=0.2)


def test_an_evaluation_is_added_up_while_it_goes_on(monkeypatch):
    """However long it takes, little detail of it is needed, and spans do not pile up."""
    monkeypatch.setattr("lightning_npu.metering.recorder.FOLD_S", 0.02)
    recorder = Recorder(EnergyMonitor([boards()], interval_s=0.002))
    recorder.start()
    recorder.interrupt("test")
    for _ in range(200):
        time.sleep(0.002)  # the work
        recorder.evaluated(4)
    assert recorder.phase_s["test"] > 0.1
    assert len(recorder._elsewhere) == 0
    assert recorder.samples == 800
    recorder.resume()
    recorder.stop()
    assert set(recorder.by_phase) == {"other", "test"}
    assert recorder.phase_s["test"] == pytest.approx(recorder.elapsed_s, rel=0.3)
    parts = sum(total.energy_j for totals in recorder.by_phase.values() for total in totals.values())
    assert parts == pytest.approx(sum(total.energy_j for total in recorder.totals.values()), rel=1e-6)


def test_phases_are_added_up_where_nothing_is_logged(monkeypatch):
    from lightning_npu.metering import recorder as module

    monkeypatch.setattr(module, "FOLD_S", 0.02)
    recorder = Recorder(EnergyMonitor([boards()], interval_s=0.005))
    recorder.start()
    until_s, steps = time.monotonic() + 0.3, 0
    while time.monotonic() < until_s:
        recorder.phases.switch("train")
        steps += 1
        recorder.step_done(1, steps)
        time.sleep(0.0005)
    assert steps > 50
    assert recorder.by_phase["train"]
    assert len(recorder.phases.waiting()) < steps
    recorder.stop()


def test_short_epochs_cost_what_they_cost():
    """Their energy is extrapolated where a counter is slow, and what came before them settles meanwhile."""
    recorder = Recorder(EnergyMonitor([boards(update_s=0.1)], interval_s=0.01))
    recorder.start()
    for number in range(60):
        recorder.interrupt("validation")
        _busy(0.004)
        recorder.resume()
        recorder.begin_epoch()
        recorder.phases.switch("train")
        _busy(0.002)
        recorder.step_done(1, number)
        recorder.phases.switch("other")
        recorder.end_epoch()
        epoch = recorder.epoch()
        assert epoch is not None
        for key, total in epoch.training.items():
            assert 0.0 <= total.energy_j <= epoch.whole[key].energy_j + epoch.whole[key].uncertainty_j
    recorder.stop()


def _busy(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def test_a_snapshot_is_whole_at_every_moment():
    recorder = Recorder(EnergyMonitor([boards(update_s=0.05)], interval_s=0.01))
    recorder.start()
    for step in range(40):
        recorder.phases.switch("train")
        until_s = time.monotonic() + 0.003
        while time.monotonic() < until_s:
            pass
        if step % 7 == 3:
            recorder.interrupt("checkpoint")
        totals, by_phase, phase_s, elapsed_s = recorder.snapshot()
        for key, total in totals.items():
            parts = sum(phase[key].energy_j for phase in by_phase.values() if key in phase)
            assert parts == pytest.approx(total.energy_j, rel=1e-6)
        assert sum(phase_s.values()) == pytest.approx(elapsed_s, rel=1e-6)
        if step % 7 == 3:
            recorder.resume()
        recorder.step_done(1, step)
    recorder.stop()
    assert recorder.stop() is None


# --- files

REPORT = json.loads((Path(__file__).parent / "energy.schema.json").read_text())


def a_document(**changes: Any) -> dict[str, Any]:
    account = Account({"a": a_total()}, {"train": {"a": a_total()}}, {"train": 2.0}, 8, 2, 2.0)
    settings: dict[str, Any] = {
        **{"stage": "fit", "started_at": 0.0, "ended": "finished", "epochs": [], "health": {}, "idle_power_w": None},
        **{"unmetered": {}, "overlap": None, "modules": {}, "failures": [], "ranks": 1, "ranks_merged": True},
        "earlier": Account(),
    }
    return document(account, **{**settings, **changes})


def test_the_document_keeps_to_its_schema(tmp_path):
    jsonschema.validate(a_document(), REPORT)
    content = a_document(health={"a": {"counter_ratio": math.nan, "period": math.inf}})
    assert content["boards"]["a"]["health"] == {"counter_ratio": None, "period": None}
    energy = meter(idle_power_w={"gpu": 40.0})
    make_trainer(tmp_path, energy).fit(Model(), loader(), loader(4))
    report = read_report(energy.path)
    jsonschema.validate(report, REPORT)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**report, "samples": "many"}, REPORT)
    empty = document(Account(), **{**_settings(a_document()), "stage": "test"})
    jsonschema.validate(empty, REPORT)
    assert (empty["total"], empty["per_sample_j"]) == (None, None)


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"started_at": None, "ended": "", "epochs": [], "health": {}, "idle_power_w": None, "unmetered": {}},
        **{"overlap": None, "modules": {}, "failures": [], "ranks": content["ranks"], "ranks_merged": False},
        "earlier": Account(),
    }


def test_the_trace_holds_the_energy(tmp_path):
    energy = meter()
    make_trainer(tmp_path, energy).fit(Model(step_s=0.02), loader())
    trace = read_trace(tmp_path / "power_trace.csv")
    gpu = next(board for board, kind in trace.boards.items() if kind == "gpu")
    rows = trace.of(gpu)
    seconds = energy.report["elapsed_s"]
    mean_w = sum(row.power_w for row in rows) / len(rows)
    assert mean_w * seconds == pytest.approx(energy.report["by_kind"]["gpu"]["energy_j"], rel=0.25)
    assert [row for row in rows if not GPU.low_w - 1 <= row.power_w <= GPU.high_w + 1] == []


def a_monitor() -> EnergyMonitor:
    monitor = EnergyMonitor([boards()])
    monitor.start()
    monitor.stop()
    return monitor


def test_files_of_other_runs_are_never_written_over(tmp_path):
    (tmp_path / "energy.json").write_text("mine")
    (tmp_path / "power_trace-2.csv").write_text("mine too")
    runs = [RunFiles(tmp_path, "fit", 0, trace=True) for _ in range(3)]
    monitor = a_monitor()
    for _ in range(2):
        for run in runs:
            run.write(a_document(), monitor)
    assert [run.path.name for run in runs] == ["energy-3.json", "energy-4.json", "energy-5.json"]
    assert (tmp_path / "energy.json").read_text() == "mine"
    assert (tmp_path / "power_trace-2.csv").read_text() == "mine too"
    assert sum(path.name.startswith("power_trace") for path in tmp_path.iterdir()) == 4
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "energy.json", {}, replace=False)
    assert (tmp_path / "energy.json").read_text() == "mine"


def test_without_hard_links_nothing_is_written_over_either(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError("no links here")

    monkeypatch.setattr(files.os, "link", refuse)
    write_json(tmp_path / "a.json", {"a": 1}, replace=False)
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "a.json", {}, replace=False)
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_written_does_not_end_training(tmp_path, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")  # root may write into any folder
    energy = meter()
    with caplog.at_level(logging.WARNING, logger="lightning_npu"):
        make_trainer(blocked, energy, max_epochs=3).fit(Model(), loader())
    assert energy.report["samples"] == 120
    assert energy.path is None
    (record,) = caplog.records
    assert f"cannot be written to {blocked}" in record.getMessage()


FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from meter_parts import *
from test_metering import a_document, a_monitor
from lightning_npu.metering.files import RunFiles
folder, monitor = Path({folder!r}), a_monitor()
files = RunFiles(folder, "fit", 0, trace=True)
files.write(a_document(), monitor)
before = files.path.read_text()
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # as on a disk that is full
files.write(a_document(ended="later"), monitor)
assert files.path.read_text() == before
assert sorted(path.name for path in folder.iterdir()) == ["energy.json", "power_trace.csv"]
print("kept")
"""

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from meter_parts import *
from test_metering import a_document
from lightning_npu.metering import files
path = Path({folder!r}) / "energy.json"
files.write_json(path, a_document())
dump = files.json.dump
def cut(content, file, **options):
    dump(content, file, **options)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
files.json.dump = cut
files.write_json(path, a_document(ended="later"))
"""


@pytest.mark.parametrize("script", [FULL, KILLED])
def test_what_is_there_stays_whole(tmp_path, script):
    code = script.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == (0 if script is FULL else -signal.SIGKILL), done.stderr
    assert read_report(tmp_path / "energy.json")["ended"] == "finished"
    assert ("kept" in done.stdout) == (script is FULL)
    assert ("cannot be written" in done.stderr) == (script is FULL)


def test_writing_takes_a_small_share_of_the_time(tmp_path):
    run = RunFiles(tmp_path, "fit", 0, trace=False)
    assert run.due
    run.write(a_document(), a_monitor())
    assert not run.due
    assert not RunFiles(None, "fit", 0, trace=True).write(a_document(), a_monitor())


# --- who reads what


def test_a_board_of_a_source_by_itself():
    source = SimulatedSource([SimulatedBoard(5.0, name="a", counter=True), SimulatedBoard(7.0, name="b", counter=True)])
    one = OneBoard(source, source.boards()[1])
    assert [board.key for board in one.boards()] == [source.boards()[1].key]
    recipe = one.recipe()
    assert recipe is not None
    assert json.loads(json.dumps(recipe.options)) == recipe.options
    again = make(recipe)
    assert again.boards()[0].key == one.boards()[0].key
    assert again.read(again.boards()[0]).power_w == 7.0


def test_sources_without_boards_are_told_by_name():
    class Broken(SimulatedSource):
        def boards(self):
            raise ValueError("what\nis this")

    good = boards()
    kept, problems = divide([Broken([SimulatedBoard(1.0)]), good, Broken([SimulatedBoard(1.0)])])
    assert kept == [good]
    assert problems == dict.fromkeys(("simulated", "simulated #2"), "ValueError: what is this")
    assert unused_name("a", ("a", "a #2")) == "a #3"


def test_the_part_that_is_unmetered_is_named():
    sensors = Sensors(
        parts={"training": "gpu", "encoder": "cpu", "other": "npu"},
        sources_of={"training": ["nvml"], "encoder": ["rapl"], "other": ["mobilint"]},
    )
    problems = {"rapl": "no permission", "mobilint": "no driver"}
    assert sensors.unmetered({"gpu"}, problems) == {"cpu (encoder)": "no permission", "npu (other)": "no driver"}
    assert sensors.unmetered({"gpu", "cpu", "npu"}, {}) == {}
    assert sensors.unmetered({"gpu", "cpu", "npu"}, {"other": "no sensor"}) == {"npu (other)": "no sensor"}
    assert sensors.unmetered({"gpu", "cpu", "npu"}, {"a/b": "never read"}) == {"a/b": "never read"}


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (None, 0),
        (torch.zeros(3, 2), 3),
        ({"a": {"b": [torch.tensor(1.0), torch.zeros(4)]}}, 4),
        (["text"], 1),
        (torch.tensor(2.0), 1),
        ((torch.zeros(0, 2), torch.zeros(5)), 0),
    ],
)
def test_samples_of_a_batch(batch, count):
    assert samples_of(batch) == count


def test_a_sum_that_leaves_a_board_out_is_not_shown():
    totals = {"h/a": a_total(kind="gpu"), "h/b": a_total(index=1)}
    shown = values.of_power({"h/a": 5.0, "h/b": None}, totals)
    assert shown == {keys.board_power_w("simulated-gpu0"): 5.0, keys.GPU_POWER_W: 5.0}
    assert values.of_power({"h/a": None}, totals) == {}
    assert keys.BOARD_POWER_W in values.of_power({"h/a": 5.0, "h/b": 1.0}, totals)


# --- W&B, offline, read back


def test_a_run_in_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install 'lightning-npu[wandb]'")
    import wandb_file
    from lightning.pytorch.loggers import WandbLogger

    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    logger = WandbLogger(project="p", save_dir=tmp_path)
    energy = meter(boards(update_s=0.1), rolling_s=0.05)
    trainer = make_trainer(tmp_path, energy, logger=logger, log_every_n_steps=2, max_epochs=3)
    model = Model(step_s=0.01)
    trainer.fit(model, loader(), loader(8))
    trainer.test(model, loader(8), verbose=False)
    logger.experiment.finish()
    found = wandb_file.finished_run(tmp_path)
    wandb.teardown()
    rows = wandb_file.history(found)
    logged = {key for row in rows for key in row if key.startswith(("energy/", "npu/"))}
    assert [key for key in logged if not keys.is_logged(key.split(".")[0])] == []
    for key in (keys.TOTAL_J, keys.ELAPSED_S):
        column = [row[key] for row in rows if key in row]
        assert len(column) > 10
        assert column == sorted(column), key
    axes = wandb_file.metrics(found)
    assert axes["energy/*"] == keys.ELAPSED_S
    assert axes["val*"] == keys.TOTAL_J
    summary = wandb_file.summary(found)
    report = read_report(next(tmp_path.rglob("energy.json")))
    assert summary[keys.TOTAL_J] == total_j(report)
    assert summary[keys.phase_j("train")] == report["phases"]["train"]["energy_j"]
    assert summary[keys.phase_j("test")] > 0
    for key, name in ((keys.PER_SAMPLE_J, "per_sample_j"), (keys.PER_OPTIMIZER_STEP_J, "per_optimizer_step_j")):
        assert summary[key] == report[name], "of the whole run, not of its last epoch"
    table = next(row for row in rows if f"{keys.POWER_TRACE}._type" in row)
    assert table[f"{keys.POWER_TRACE}._type"] == "table-file"
    assert table[f"{keys.POWER_TRACE}.nrows"] > 10
    assert energy.path.name == "energy-test.json"
    assert energy.path.parent == next(tmp_path.rglob("energy.json")).parent
