"""Other tests measure against the stub drivers, so these are held against a second writing of the same model."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from stubs import NPU_LOAD, SENSORS, Load, Part, Sensors, StubBoard, no_nvml_library

LOADS = [
    Load.constant(100.0),
    Load("square", 50.0, 180.0, 0.511, 0.3),
    Load("sine", 50.0, 180.0, 0.2),
    Load("telegraph", 50.0, 180.0, 0.037),
]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.kind)
def test_truth_in_python_and_in_c_agree(stub_nvml, load):
    stub = stub_nvml([StubBoard(load, seed=3)])
    now = time.monotonic()
    stub.span(0, 300.0, after_s=1.0, for_s=0.7)
    stub.span(0, 20.0, after_s=-2.0, for_s=0.5)
    chance = random.Random(0)
    for _ in range(50):
        t0 = now + chance.uniform(-5, 5)
        t1 = t0 + chance.choice([0.01, 0.3, 4.0]) * chance.random()
        assert stub.truth_j(0, t0, t1) == pytest.approx(stub.c.stub_truth_j(0, t0, t1), abs=1e-6)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.kind)
def test_truth_is_the_integral_of_the_power(stub_nvml, load):
    stub = stub_nvml([StubBoard(load, Sensors(Part(0.0)))])
    t0 = time.monotonic()
    step = 1e-4
    total = sum(stub.c.stub_power_w(0, t0 + (i + 0.5) * step) * step for i in range(20_000))
    assert total == pytest.approx(stub.truth_j(0, t0, t0 + 20_000 * step), rel=1e-3)


def test_counter_steps_once_per_period_and_counts_exactly(stub_nvml):
    stub = stub_nvml([StubBoard(sensors=Sensors(counter=Part(0.1, jitter=0.0, clock=0.0)))])
    t0 = time.monotonic()
    values = [stub.c.stub_counter_j(0, t0 + i * 1e-3) for i in range(1000)]
    steps = [i for i in range(1, 1000) if values[i] != values[i - 1]]
    assert len(steps) in (9, 10)
    assert {b - a for a, b in itertools.pairwise(steps)} <= {99, 100, 101}
    first, last = steps[0] * 1e-3, steps[-1] * 1e-3
    # a step shows within 1 ms of its tick
    assert values[steps[-1]] - values[steps[0]] == pytest.approx(stub.truth_j(0, t0 + first, t0 + last), abs=0.4)


def test_updates_jitter_around_a_clock_of_their_own(stub_nvml):
    stub = stub_nvml([StubBoard(Load.constant(100.0), Sensors(counter=Part(0.1, jitter=0.1)))])
    t0 = time.monotonic()
    values = [stub.c.stub_counter_j(0, t0 + i * 1e-3) for i in range(20_000)]
    steps = [i for i in range(1, len(values)) if values[i] != values[i - 1]]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert all(77 <= gap <= 123 for gap in gaps)
    assert min(gaps) < 95
    assert max(gaps) > 105
    assert 97.5 <= sum(gaps) / len(gaps) <= 102.5


def test_part_time_counter_misses_what_happens_between(stub_nvml):
    load = Load("square", 50, 180, 0.1)  # in step with the counter, which sees the same quarter of every period
    part = Part(0.1, 0.025, jitter=0.0, clock=0.0)
    sensors = Sensors(part, part)
    stub = stub_nvml([StubBoard(Load.constant(90.0), sensors), *(StubBoard(load, sensors) for _ in range(12))])
    t0 = time.monotonic()

    def counted_w(board: int) -> float:
        return (stub.c.stub_counter_j(board, t0 + 100.0) - stub.c.stub_counter_j(board, t0)) / 100.0

    assert counted_w(0) == pytest.approx(90.0, abs=0.1)
    seen = [counted_w(board) for board in range(1, 13)]
    assert all(49.0 < power_w < 181.0 for power_w in seen)
    assert max(abs(power_w - 115.0) for power_w in seen) > 30.0
    for board, power_w in enumerate(seen, 1):
        assert stub.c.stub_power_w(board, t0) == pytest.approx(power_w, abs=0.2)


def test_averaging_sensor_lags(stub_nvml):
    stub = stub_nvml([StubBoard(Load("square", 0, 100, 1.0), "hopper")])
    t0 = time.monotonic()
    assert {round(stub.c.stub_power_w(0, t0 + i * 0.01)) for i in range(200)} == {50}  # 1 s mean of a 1 s square


def test_real_pynvml_reads_the_stub(stub_nvml):
    pynvml = pytest.importorskip("pynvml")
    mig = ("MIG-aaaa", "MIG-bbbb")
    stub = stub_nvml([StubBoard(Load.constant(123.456), mig=mig, name="Stub A100"), StubBoard(sensors="pascal")])
    pynvml.nvmlInit()
    try:
        assert pynvml.nvmlDeviceGetCount() == 2
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        assert uuid == "GPU-00000000-1111-2222-3333-444455556666"
        assert pynvml.nvmlDeviceGetName(handle) == "Stub A100"
        assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 0
        assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:10:00.0"
        assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId("0000:11:00.0")) == 1
        assert pynvml.nvmlDeviceGetPowerUsage(handle) == 123_456
        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        assert before >= 593_971_000
        fields = [(pynvml.NVML_FI_DEV_POWER_INSTANT, 0), (pynvml.NVML_FI_DEV_POWER_AVERAGE, 2)]
        instant, memory = pynvml.nvmlDeviceGetFieldValues(handle, fields)
        assert (instant.nvmlReturn, instant.value.uiVal) == (0, 123_456)
        assert memory.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]
        slice_ = pynvml.nvmlDeviceGetHandleByUUID("MIG-bbbb")
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice_)) == uuid
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetPowerUsage(slice_)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(1))
        assert stub.calls["power"] == 2
        assert stub.board_calls(1)["counter"] == 1
    finally:
        pynvml.nvmlShutdown()


def test_faults_come_and_go(stub_nvml):
    pynvml = pytest.importorskip("pynvml")
    stub = stub_nvml([StubBoard(Load.constant(100.0), "ideal")])
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def energy_j() -> float:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    stub.fault(0, "power_error", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlDeviceGetPowerUsage(handle)
    assert energy_j() > 593_971
    stub.clear(0)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 100_000
    stub.fault(0, "counter_error", 999)
    with pytest.raises(pynvml.NVMLError_Unknown):
        energy_j()
    stub.clear(0)
    stub.fault(0, "counter_reset", 5.0)
    assert 5.0 <= energy_j() < 1000.0
    stub.clear(0)
    stub.fault(0, "counter_freeze")
    assert energy_j() == energy_j()
    stub.clear(0)
    before = energy_j()
    stub.fault(0, "counter_add", 1e6)
    assert energy_j() >= before + 1e6
    stub.clear(0)
    stub.fault(0, "counter_wrap", 500_000.0)
    assert 93_971 <= energy_j() < 100_000
    stub.clear(0)
    stub.fault(0, "power_value", 4e6)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 4_000_000_000
    stub.clear(0)
    stub.fault(0, "lost", pynvml.NVML_ERROR_GPU_IS_LOST)
    for call in (
        energy_j,
        lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        lambda: pynvml.nvmlDeviceGetHandleByIndex(0),
    ):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            call()
    stub.clear(0)
    stub.call_s = 0.02
    begin = time.monotonic()
    energy_j()
    assert time.monotonic() - begin >= 0.02


@pytest.mark.parametrize(("code", "error"), [(9, "DriverNotLoaded"), (4, "NoPermission")])
def test_nvml_that_does_not_start(stub_nvml, code, error):
    pynvml = pytest.importorskip("pynvml")
    stub_nvml(init_error=code)
    with pytest.raises(getattr(pynvml, f"NVMLError_{error}")):
        pynvml.nvmlInit()


def test_no_nvml_library():
    pynvml = pytest.importorskip("pynvml")
    with no_nvml_library(), pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()


CHILD = """
import json, time
result = {}
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
result["nvml_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
import mbltml
mbltml.mbltmlInit()
arguments = (mbltml.MBLTML_TARGET_DEVICE_ARIES_RB, 0) if hasattr(mbltml, "mbltmlGetTargetDeviceCount") else (0,)
result["npu_w"] = mbltml.mbltmlGetTotalPower(*arguments)
print(json.dumps(result))
"""


@pytest.mark.parametrize("form", ["1.5.0", "0.0.0"])
def test_a_subprocess_finds_both(stub_nvml, stub_mbltml, form):
    nvml, npu = stub_nvml([StubBoard(Load.constant(111.0))]), stub_mbltml([StubBoard(Load.constant(12.5))], form=form)
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert json.loads(child.stdout) == pytest.approx({"nvml_w": 111.0, "npu_w": 12.5})
    assert nvml.calls["power"] == npu.calls["power"] == 1


@pytest.mark.parametrize("form", ["1.5.0", "0.0.0"])
def test_real_mbltml_reads_the_stub(stub_mbltml, form):
    boards = [StubBoard(NPU_LOAD, "npu1s"), StubBoard(Load.constant(9.0), "npu", target_type=4, chip_id=7)]
    stub = stub_mbltml(boards, form=form)
    import mbltml

    mbltml.mbltmlInit()
    assert mbltml.mbltmlGetDeviceCount() == 2
    if form == "1.5.0":
        board, other = (mbltml.MBLTML_TARGET_DEVICE_ARIES_RB, 0), (mbltml.MBLTML_TARGET_DEVICE_REGULUS_RB, 0)
        assert mbltml.mbltmlGetTargetDeviceCount(mbltml.MBLTML_TARGET_DEVICE_ARIES_RB) == 1
        assert mbltml.mbltmlGetPcieSlot(*board) == "0000:10:00.0"
        assert mbltml.mbltmlGetChipId(*other) == 7
        with pytest.raises(mbltml.MBLTMLDeviceNotFoundError):
            mbltml.mbltmlGetTotalPower(mbltml.MBLTML_TARGET_DEVICE_ARIES_RA, 0)
    else:
        board, other = (0,), (1,)
        assert mbltml.mbltmlGetHardwareVersion(0) == mbltml.MBLTML_HARDWARE_VERSION_ARIES2
    assert mbltml.mbltmlGetNodeName(*board) == "/dev/aries0"
    assert mbltml.mbltmlGetTotalPower(*board) in (pytest.approx(8.0), pytest.approx(25.0))
    assert mbltml.mbltmlGetTotalPower(*other) == pytest.approx(9.0)
    with pytest.raises(mbltml.MBLTMLInvalidArgumentError):
        mbltml.mbltmlGetTotalPower(*board[:-1], 5)
    stub.fault(0, "power_value", -1.0)
    assert mbltml.mbltmlGetTotalPower(*board) == -1.0
    stub.fault(0, "lost", mbltml.MBLTML_DRIVER_NOT_FOUND)
    with pytest.raises(mbltml.MBLTMLDriverNotFoundError):
        mbltml.mbltmlGetTotalPower(*board)
    mbltml.mbltmlShutdown()
    stub.init_error = mbltml.MBLTML_UNINITIALIZED
    with pytest.raises(mbltml.MBLTMLUninitializedError):
        mbltml.mbltmlInit()


def test_bindings_are_left_as_they_were(stub_nvml):
    pynvml = pytest.importorskip("pynvml")
    before = (pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache))
    from stubs import StubNvml

    with no_nvml_library(), StubNvml():
        pynvml.nvmlInit()
    assert (pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache)) == before


def test_noise_has_the_spread_it_claims(stub_nvml):
    stub = stub_nvml([StubBoard(Load.constant(100.0), replace(SENSORS["pascal"], noise_w=2.0))])
    t0 = time.monotonic()
    values = [stub.c.stub_power_w(0, t0 + 0.02 * i) for i in range(2000)]
    mean = sum(values) / len(values)
    spread = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    assert mean == pytest.approx(100.0, abs=0.3)
    assert spread == pytest.approx(2.0, rel=0.1)
