"""The checks, each of one thing that documentation and wheels left open."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lightning_npu.errors import NPUError
from lightning_npu.runtimes.mobilint.cores import UNITS, configure
from lightning_npu.runtimes.mobilint.errors import status_name
from lightning_npu.runtimes.mobilint.model import LaunchedModel
from lightning_npu.verify_mobilint.bench import Bench, Result, equal, images, in_a_process, rate

_PROCESS_S = 120.0
_TELLING_S = 0.01  # in shorter calls, what the vendor does in Python weighs too much
_FREE_SHARE = 0.1  # of a call's time; a busy machine leaves more than that to a thread that is free
_START_S = 10.0  # until two processes have opened the device and begin at once


def opens(bench: Bench) -> Result:
    """The MXQ is launched, three times over, and says what it is."""
    took = []
    for _ in range(3):
        started = time.perf_counter()
        with bench.launched() as model:
            took.append(time.perf_counter() - started)
            cores = [f"{i.cluster.name}.{i.core.name}" for i in model.get_target_cores()]
            facts = (
                f"mode {model.get_core_mode().name}, cores {cores}, "
                f"inputs {model.get_model_input_shape()} {model.get_model_input_data_type().name}, "
                f"outputs {model.get_model_output_shape()} {model.get_model_output_data_type().name}"
            )
    return Result("pass", f"opened in {', '.join(f'{value:.2f}' for value in took)} s; {facts}")


def repeats(bench: Bench) -> Result:
    """One thread: the same image gives the same bits; output layout."""
    with bench.launched() as model:
        samples = images(model, 4)
        first = [list(model.infer_hwc(sample)) for sample in samples]
        same = all(equal(list(model.infer_hwc(s)), right) for s, right in zip(samples, first, strict=True))
        shapes = [(array.shape, str(array.dtype)) for array in first[0]]
        numbers = all(np.isfinite(array).all() for arrays in first for array in arrays)
        per_second, _ = rate(model, samples, 1, bench.seconds)
    verdict = "pass" if same and numbers else "FAIL"
    return Result(verdict, f"bits repeat: {same}, finite: {numbers}, {per_second:.1f} images/s, outputs {shapes}")


def threads(bench: Bench) -> Result:
    """A thread per core with blocking calls: right, and faster."""
    units = UNITS[bench.mode or "single"]
    parts, bad = [], 0
    with bench.launched() as model:
        samples = images(model, 16)
        for count in sorted({1, units, 2 * units}):
            per_second, wrong = rate(model, samples, count, bench.seconds)
            bad += wrong
            parts.append(f"{count} threads {per_second:.1f} images/s ({wrong} wrong)")
    return Result("FAIL" if bad else "pass", "; ".join(parts))


def gil(bench: Bench) -> Result:
    """Python goes on while an image is computed: another thread gets its turns all along, not between calls."""
    calls, interval_s = 10, sys.getswitchinterval()
    with bench.launched() as model:
        sample = images(model, 1)[0]
        worker = threading.Thread(target=lambda: [model.infer_hwc(sample) for _ in range(calls)])
        turns, started = 0, time.thread_time()
        while time.thread_time() - started < 0.05:  # how long a turn takes this thread alone
            worker.is_alive()
            turns += 1
        turn_s, turns = 0.05 / turns, 0
        sys.setswitchinterval(1e-5)  # so short that what it gets between calls does not count
        try:
            began = time.perf_counter()
            worker.start()
            while worker.is_alive():
                time.thread_time()
                turns += 1
            call_s, share_s = (time.perf_counter() - began) / calls, turns * turn_s / calls
        finally:
            sys.setswitchinterval(interval_s)
            worker.join()
    text = f"another thread ran for about {share_s * 1e3:.2f} ms of each call of {call_s * 1e3:.2f} ms"
    if call_s < _TELLING_S:
        return Result("info", text + ": the call is too short to tell")
    return Result("pass" if share_s > _FREE_SHARE * call_s else "FAIL", text)


def batched(bench: Bench) -> Result:
    """Several images in one call: what comes back, and whether it is faster."""
    with bench.launched() as model:
        samples = images(model, 4)
        right = [list(model.infer_hwc(sample)) for sample in samples]
        stacked = [np.stack(parts) for parts in zip(*samples, strict=True)]
        started = time.perf_counter()
        for sample in samples:
            model.infer_hwc(sample)
        single_s = time.perf_counter() - started
        started = time.perf_counter()
        found = list(model.infer_hwc(stacked))
        batch_s = time.perf_counter() - started
    shapes = [array.shape for array in found]
    same = all(
        array.size == sum(part[index].size for part in right)
        and array.reshape(4, -1).tobytes() == np.stack([part[index].reshape(-1) for part in right]).tobytes()
        for index, array in enumerate(found)
    )
    text = (
        f"4 images: {batch_s * 1e3:.1f} ms in one call, {single_s * 1e3:.1f} ms in four; shapes {shapes}; equal: {same}"
    )
    return Result("info" if same else "FAIL", text + ("" if same else " (the runtime does not use batched calls)"))


def asynchronous(bench: Bench) -> Result:
    """Several asynchronous calls in flight give what one gives."""
    from lightning_npu.runtimes.mobilint.asynchronous import all_at_once

    parts, bad = [], 0
    with bench.launched(asynchronous=True) as model:
        for count in (2, 2 * UNITS[bench.mode or "single"]):
            samples = images(model, count)
            right = [list(model.infer_hwc(sample)) for sample in samples]
            wrong, done = 0, 0
            started = time.perf_counter()
            while time.perf_counter() - started < bench.seconds or not done:
                found = all_at_once(model, samples)
                wrong += sum(not equal(a, b) for a, b in zip(found, right, strict=True))
                done += count
            per_second = done / (time.perf_counter() - started)
            parts.append(f"{count} in flight: {per_second:.1f} images/s, {wrong} of {done} wrong")
            bad += wrong
    return Result("FAIL" if bad else "pass", "; ".join(parts))


def int8(bench: Bench) -> Result:
    """Whether INT8 can cross the bus, and which scales there are."""
    with bench.launched() as model:
        kinds = model.get_model_input_data_type().name, model.get_model_output_data_type().name
        scales = [
            f"uniform={scale.is_uniform} scale={scale.scale:g} channels={len(scale.scale_list)}"
            for scale in (*model.get_input_scale(), *model.get_output_scale())
        ]
        sample = [np.zeros(array.shape, np.int8) for array in images(model, 1)[0]]
        try:
            found = [(array.shape, str(array.dtype)) for array in model.infer_hwc(sample)]
            answer = f"int8 in gives {found}"
        except Exception as error:  # whichever way it refuses is the finding
            answer = f"int8 in is refused: {status_name(error) or type(error).__name__}"
    return Result("info", f"data types {kinds}; {answer}; scales: {scales}")


def isolation(bench: Bench) -> Result:
    """Two processes with half of the cores each: right, at full speed, and refused or not where they overlap."""
    units = list(range(UNITS[bench.mode or "single"]))
    if len(units) < 2:
        return Result("skipped", f"core mode {bench.mode} has one unit, which cannot be shared")
    half = len(units) // 2

    def ask(part: list[int], start_s: float = 0.0) -> dict[str, Any]:
        request = {
            "do": "run", "path": str(bench.path), "number": bench.number, "seconds": bench.seconds,
            "mode": bench.mode or "single", "units": part, "start_s": start_s,
        }  # fmt: skip
        return in_a_process(request, _PROCESS_S + bench.seconds)

    def both(first: list[int], second: list[int]) -> list[dict[str, Any]]:
        start_s = time.time() + _START_S
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda part: ask(part, start_s), (first, second)))

    alone = ask(units[:half])
    if "error" in alone:
        return Result("FAIL", f"half of the cores alone: {alone['error']}")
    together = both(units[:half], units[half:])
    overlap = both(units[:half], units[:half])
    failed = [answer["error"] for answer in together if "error" in answer]
    lap = "; ".join(a.get("error") or f"{a['rate']:.1f} images/s, {a['wrong']} wrong" for a in overlap)
    if failed:
        return Result("FAIL", f"two halves at once: {failed[0]}; on the same cores: {lap}")
    right = all(answer["digest"] == alone["digest"] and not answer["wrong"] for answer in together)
    rates = " and ".join(f"{answer['rate']:.1f}" for answer in together)
    text = f"alone {alone['rate']:.1f} images/s, two halves at once {rates}; on the same cores: {lap}"
    return Result("pass" if right else "FAIL", text)


def overlapping_models(bench: Bench) -> Result:
    """A second model of this process on the same cores: shared (MXQ v7) or refused."""
    with bench.launched() as first:
        sample = images(first, 1)[0]
        right = list(first.infer_hwc(sample))
        second = LaunchedModel(
            bench.module, bench.path, configure(bench.module, bench.plan(), asynchronous=False), bench.number
        )
        try:
            second.launch()
            with second.use() as model:
                same = equal(list(model.infer_hwc(sample)), right)
            return Result("info" if same else "FAIL", f"allowed; equal results: {same}")
        except NPUError as error:
            return Result("info", f"refused: {' '.join(str(error.got).split())[:80]}")
        finally:
            second.close()


def time_limit(bench: Bench) -> Result:
    """The vendor's own time limit ends a call, and the device is usable afterwards."""
    from lightning_npu.runtimes.mobilint.library import TIMEOUT

    request = {
        "do": "run", "path": str(bench.path), "number": bench.number, "seconds": 0.2, "mode": bench.mode or "single",
        "units": None,
    }  # fmt: skip
    answer = in_a_process(request, _PROCESS_S, **{TIMEOUT: "1"})
    seen = answer.get("error") or f"no timeout: {answer['rate']:.1f} images/s (the limit is not reached, or not read)"
    after = in_a_process(request, _PROCESS_S)
    usable = "error" not in after
    return Result("info" if usable else "FAIL", f"{TIMEOUT}=1: {seen[:300]}; usable afterwards: {usable}")


def visible_devices(bench: Bench) -> Result:
    """Whether QBRUNTIME_VISIBLE_DEVICES filters numbers, or renumbers."""
    from lightning_npu.runtimes.mobilint.library import VISIBLE, device_numbers

    numbers = device_numbers(bench.module)
    parts = [f"devices {numbers}"]
    for value in [str(numbers[-1]), str(numbers[-1] + 1)]:
        answer = in_a_process({"do": "numbers"}, _PROCESS_S, **{VISIBLE: value})
        parts.append(f"with {VISIBLE}={value}: {answer.get('numbers', answer.get('error'))}")
    return Result("info", "; ".join(parts))


CHECKS: dict[str, Callable[[Bench], Result]] = {
    "launch, dispose and launch again": opens,
    "one thread": repeats,
    "a thread per core": threads,
    "the GIL is free while an image is computed": gil,
    "several images in one call": batched,
    "asynchronous calls": asynchronous,
    "INT8 on the bus": int8,
    "two processes on one device": isolation,
    "two models on the same cores": overlapping_models,
    "the vendor's time limit": time_limit,
    "QBRUNTIME_VISIBLE_DEVICES": visible_devices,
}
