"""Accuracies that must not be lost, on scikit-learn's digits turned by 30 degrees; reduced, and in full when slow."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="pip install scikit-learn")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # its scripts import each other as scripts do

import forward_gradient as benchmark  # noqa: E402
import forward_gradient_tasks as tasks  # noqa: E402

from lightning_npu.forward_gradient import FixedPoint  # noqa: E402

SIGN = {"eps": 1e-2, "m": 3, "estimator": "sign"}


@functools.cache
def task(seed: int) -> tasks.Task:
    return tasks.TASKS["rot30 FT"](seed)


def mean(
    options: dict[str, Any], *, seeds: int, steps: int, lr: float, batch: int, int8: bool = True, key: str = "last"
) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        method = benchmark.Method((lr,), options, int8)
        runs = [benchmark.adapt(task(s), method, lr=lr, steps=steps, batch=batch, seed=s) for s in range(seeds)]
    finally:
        torch.set_num_threads(threads)
    return statistics.mean(run[key] for run in runs)


def test_16_bits_and_8_bits_with_error_feedback_learn_where_the_published_8_bits_do_not() -> None:
    """One seed, 300 steps."""
    untouched = mean(SIGN, seeds=1, steps=1, lr=0.0, batch=256)
    normal = {**SIGN, "estimator": "normalized"}
    full = mean(normal, seeds=1, steps=300, lr=3e-2, batch=256, int8=False)
    wide = mean({**normal, "fixed_point": FixedPoint(16)}, seeds=1, steps=300, lr=3e-2, batch=256)
    narrow = FixedPoint(8, headroom=0, rounding="error_feedback")
    fed = mean({**normal, "eps": 2e-2, "fixed_point": narrow}, seeds=1, steps=300, lr=3e-2, batch=256)
    literal = mean(benchmark.METHODS["8w8a literal"].options or {}, seeds=1, steps=300, lr=1e-2, batch=256)
    assert full > untouched + 25
    assert wide > full - 5
    assert fed > full - 5
    assert literal < untouched + 5


@pytest.mark.slow
def test_the_publication_in_16_bits() -> None:
    """Sign, m=3, 1,000 steps of 64: at least 79 %, and no less than its FP32 twin less 3 points."""
    full = mean(SIGN, seeds=3, steps=1000, lr=1e-2, batch=64, int8=False)
    wide = mean({**SIGN, "fixed_point": FixedPoint(16)}, seeds=3, steps=1000, lr=1e-2, batch=64)
    assert wide >= 79
    assert wide >= full - 3


@pytest.mark.slow
def test_the_publications_negative_result() -> None:
    """8-bit weights by the published recipe end at most 5 points above where they began."""
    options = benchmark.METHODS["8w8a literal"].options or {}
    begun = mean(options, seeds=3, steps=1, lr=0.0, batch=64)
    assert mean(options, seeds=3, steps=1000, lr=1e-2, batch=64) <= begun + 5


@pytest.mark.slow
def test_normalised_steps_of_256_samples() -> None:
    """16 bits at least 89 %, 8 bits with error feedback at least 86 %, at 18,000 calls at least 90 %."""
    normal = {**SIGN, "estimator": "normalized"}
    assert mean({**normal, "fixed_point": FixedPoint(16)}, seeds=3, steps=1000, lr=3e-2, batch=256) >= 89
    fed = {**normal, "eps": 2e-2, "fixed_point": FixedPoint(8, headroom=0, rounding="error_feedback")}
    assert mean(fed, seeds=3, steps=1000, lr=3e-2, batch=256) >= 86
    assert mean(fed, seeds=3, steps=3000, lr=3e-2, batch=256) >= 90


def test_the_best_checkpoint_is_the_one_that_is_reported() -> None:
    kept = benchmark.adapt(task(0), replace(benchmark.METHODS["FF FP32"]), lr=1.0, steps=20, batch=64, seed=0)
    assert kept["last"] < kept["zero_shot"]  # a rate that ruins everything
    assert kept["test"] >= kept["zero_shot"] - 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_takes_hardly_more_memory_than_inference() -> None:
    peaks = {}
    for mode in ("inference", "forward", "fixed16", "fixed8", "backward"):
        command = [sys.executable, str(BENCHMARKS / "forward_gradient_memory.py"), mode]
        peaks[mode] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peaks["forward"] <= 1.1 * peaks["inference"]
    assert peaks["fixed16"] <= 1.1 * peaks["inference"]
    assert peaks["fixed8"] <= 1.25 * peaks["inference"]  # one byte per weight for what rounding cut off
    assert peaks["backward"] > 3 * peaks["inference"]  # the measure can tell
