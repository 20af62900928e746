# ruff: noqa: F811  # pytest fixtures are imported by name
"""The real ``mobilint-qb-runtime`` without a device: what it says of it, of bad files, and of its configuration."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_images
from mobilint_parts import board, fake_module, hold_encoder, make_mobilint, needs_vendor  # noqa: F401

import lightning_npu as npu
from lightning_npu.runtimes.mobilint import library
from lightning_npu.runtimes.mobilint.cores import CorePlan, configure
from lightning_npu.runtimes.mobilint.errors import STATUSES, status_name, status_of, translate
from lightning_npu.runtimes.mobilint.model import LaunchedModel
from lightning_npu.runtimes.mobilint.mxq import check_mxq
from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime

pytestmark = needs_vendor
DEVICE = bool(library.device_nodes())
needs_no_device = pytest.mark.skipif(DEVICE, reason="there is a device")


@pytest.fixture
def qb() -> Any:
    return library.load()


def numbers() -> tuple[int, int]:
    major, minor = version(library.DISTRIBUTION).split(".")[:2]
    return int(major), int(minor)


def caught(call: Any) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011  # which class it is, is what is tested
        call()
    return info.value


# ---- no device


@needs_no_device
def test_opening_without_a_device(qb: Any) -> None:
    expected = "Acc_DeviceNotFound" if library.has_names(qb) else "Driver_NotInitialized"
    for number in (0, -1):
        error = caught(lambda number=number: qb.Accelerator(number))
        assert isinstance(error, qb.QbRuntimeError if hasattr(qb, "QbRuntimeError") else RuntimeError)
        assert status_name(error) == expected
    with pytest.raises(npu.RuntimeUnavailableError, match=r"Mobilint device 0 failed while opening it(.|\n)*doctor"):
        library.open_accelerator(qb, 0)


@needs_no_device
def test_names_of_devices(qb: Any) -> None:
    if not library.has_names(qb):
        assert isinstance(caught(lambda: qb.Accelerator("aries")), TypeError)
        return
    for name in ("aries", "regulus"):
        assert status_name(caught(lambda name=name: qb.Accelerator(name))) == "Acc_DeviceNotFound"
    for number in (0, 99):
        assert status_name(caught(lambda number=number: qb.Accelerator("aries-rb", number))) == "Driver_NotInitialized"
    assert status_name(caught(lambda: qb.Accelerator("bogus"))) == "Acc_UnknownDevice"
    assert isinstance(caught(lambda: qb.Accelerator(None)), TypeError)
    assert qb.get_available_devices() == []


@needs_no_device
def test_the_list_of_devices_is_empty_and_never_raises(qb: Any) -> None:
    assert library.device_numbers(qb) == []
    answer = MobilintRuntime.available()
    assert answer.startswith("there is no device node /dev/aries0: install the driver")
    assert "lspci -d 209f:" in answer


@needs_no_device
def test_an_artifact_on_a_machine_without_device(compiled: npu.Artifact, tmp_path: Path) -> None:
    artifact = make_mobilint(compiled.path, tmp_path / "encoder.npu")
    with pytest.raises(
        npu.RuntimeUnavailableError, match=r"qbruntime finds no ARIES device(.|\n)*not set(.|\n)*doctor"
    ):
        npu.NPUFrozenModule(artifact, runtime="mobilint").describe()
    assert npu.NPUFrozenModule(artifact).describe()["runtime"] == "onnx"


def test_hiding_devices_is_a_filter(tmp_path: Path) -> None:
    if numbers() < (1, 4):
        pytest.skip("the message is that of 1.4 and later")
    out = run_quiet(
        "import qbruntime as q\ntry: q.Accelerator('aries-rb', 0)\nexcept Exception as e: print(str(e)[:30])",
        QBRUNTIME_VISIBLE_DEVICES="x", QBRUNTIME_LOG_LEVEL="info",
    )  # fmt: skip
    assert "Device #0 is not visible (QBRUNTIME_VISIBLE_DEVICES='x')" in out
    assert "Driver_NotInitialized occurred" in out


# ---- bad files


def bad_files(folder: Path) -> dict[str, Path]:
    (folder / "folder.mxq").mkdir()
    (folder / "empty.mxq").touch()
    (folder / "garbage.mxq").write_bytes(b"garbage" * 100)
    return {
        "missing": folder / "missing.mxq",
        "folder": folder / "folder.mxq",
        "empty": folder / "empty.mxq",
        "garbage": folder / "garbage.mxq",
    }


def test_the_vendor_says_the_same_of_all_bad_files_and_we_do_not(qb: Any, tmp_path: Path) -> None:
    messages = set()
    for kind, path in bad_files(tmp_path).items():
        for arguments in ((str(path),), (str(path), qb.ModelConfig())):
            assert status_name(caught(lambda arguments=arguments: qb.Model(*arguments))) == "Model_FailedToLoadMXQ"
        with pytest.raises(npu.ArtifactError) as info:
            check_mxq(path)
        messages.add(str(info.value).replace(kind, ""))
    assert len(messages) == 4
    assert qb.get_model_summary(str(tmp_path / "garbage.mxq")) == ""
    assert isinstance(caught(lambda: qb.Model(tmp_path / "garbage.mxq")), TypeError)  # a str is wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty(.|\n)*copy the artifact again"),
        (b"garbage", r"is no MXQ file(.|\n)*begins with b'\.MXQ'(.|\n)*b'garb'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", r"Git LFS pointer(.|\n)*git lfs pull"),
        (b".MXQ\x07", r"is cut off(.|\n)*5 bytes"),
    ],
)
def test_bad_files_are_told_apart(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.mxq").write_bytes(content)
    with pytest.raises(npu.ArtifactError, match=message):
        check_mxq(tmp_path / "model.mxq")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_refused_before_anybody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.mxq")
    with pytest.raises(npu.ArtifactError, match=r"model\.mxq is no regular file"):
        check_mxq(tmp_path / "model.mxq")


def test_an_mxq_that_is_not_the_listed_one_is_refused_by_its_hash(compiled: npu.Artifact, tmp_path: Path) -> None:
    artifact = make_mobilint(compiled.path, tmp_path / "encoder.npu")
    path = artifact.file("mxq")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    with pytest.raises(npu.ArtifactError, match=r"File 'mxq' \(model\.mxq\)(.|\n)*its SHA-256 is wrong"):
        module.describe()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(npu.ArtifactError, match=r"File 'mxq'(.|\n)*truncated or was replaced"):
        npu.Artifact.load(artifact.path)


def test_an_mxq_begins_with_what_the_vendor_looks_for(tmp_path: Path) -> None:
    """Of all beginnings, this one makes the vendor ask for a version instead of a magic value."""
    said = {}
    for head in (b".MXQ", b"QXM.", b"MXQ.", b"XXXX"):
        path = tmp_path / f"{head.hex()}.mxq"
        path.write_bytes(head + bytes(200))
        said[head] = run_quiet(f"import qbruntime as q\ntry: q.Model({str(path)!r})\nexcept Exception: pass")
    assert "No matching MXQ version" in said.pop(b".MXQ")
    assert all("Invalid magic value" in text for text in said.values())


def test_a_file_of_the_right_beginning_that_is_none(qb: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.mxq"
    path.write_bytes(b".MXQ" + bytes(200))
    check_mxq(path)
    with pytest.raises(npu.ArtifactError, match=r"cannot be read by this qbruntime \(Model_FailedToLoadMXQ\)") as info:
        raise translate(caught(lambda: qb.Model(str(path))), "reading model.mxq", "Mobilint device 0")
    assert "update mobilint-qb-runtime" in str(info.value)
    assert capfd.readouterr().out == ""


# ---- configuration


def test_setters_answer_false_and_change_nothing(qb: Any) -> None:
    def after(call: Any) -> tuple[bool, str]:
        config = qb.ModelConfig()
        return call(config), config.get_core_mode().name

    def core(name: str, cluster: str = "Cluster0") -> Any:
        return qb.CoreId(getattr(qb.Cluster, cluster), getattr(qb.Core, name))

    assert after(lambda c: c.set_auto_core_mode()) == (True, "Auto")
    assert after(lambda c: c.set_single_core_mode(core_ids=[core("Core0")])) == (True, "Single")
    assert after(lambda c: c.set_single_core_mode(core_ids=[])) == (False, "Auto")
    assert after(lambda c: c.set_single_core_mode(0)) == (False, "Auto")
    for wrong in (core("All"), core("GlobalCore"), core("Core0", "Error")):
        assert after(lambda c, wrong=wrong: c.set_single_core_mode(core_ids=[wrong])) == (False, "Auto")
    assert after(lambda c: c.set_global4_core_mode([qb.Cluster.Cluster1])) == (True, "Global4")
    assert after(lambda c: c.set_global4_core_mode([])) == (False, "Auto")
    assert after(lambda c: c.set_global8_core_mode()) == (True, "Global8")
    assert after(lambda c: c.set_multi_core_mode([])) == (False, "Auto")
    # from 1.4 on, more cores than there are is seen when the model is made only
    assert after(lambda c: c.set_single_core_mode(9)) == ((True, "Single") if numbers() >= (1, 4) else (False, "Auto"))
    config = qb.ModelConfig()
    config.set_single_core_mode(core_ids=[core("Core0"), core("Core0")])
    assert len(config.get_core_ids()) == 1
    assert config.set_async_pipeline_enabled(True) is None
    assert config.set_activation_slots(3) is None
    config.set_single_core_mode(core_ids=[core("Core1")])
    assert config.get_async_pipeline_enabled() is True
    config.set_auto_core_mode()
    assert config.get_activation_slots() == (-1 if numbers() >= (1, 5) else 1)


@pytest.mark.parametrize(
    "plan",
    [
        CorePlan("single", tuple(range(8)), auto=True),
        CorePlan("single", (4, 5, 6, 7), shared=True),
        CorePlan("global4", (1,), shared=True),
        CorePlan("global8", (0,)),
    ],
)
def test_plans_become_the_vendors_configuration(qb: Any, plan: CorePlan) -> None:
    config = configure(qb, plan, asynchronous=True)
    mode = config.get_core_mode().name
    assert mode.lower() == ("auto" if plan.auto else plan.mode)
    assert config.get_async_pipeline_enabled()
    if mode == "Single":
        assert [(i.cluster.name, i.core.name) for i in config.get_core_ids()] == [
            ("Cluster1", f"Core{core}") for core in range(4)
        ]
    if mode == "Global4" and numbers() >= (1, 4):
        assert [cluster.name for cluster in config.get_clusters()] == ["Cluster1"]


def test_a_setter_that_refuses_is_an_error(qb: Any) -> None:
    with pytest.raises(npu.DeviceError, match=r"set_single_core_mode\(core_ids=\[\]\)(.|\n)*True(.|\n)*Got: False"):
        configure(qb, CorePlan("single", ()), asynchronous=False)


def test_the_vendors_objects_do_not_travel_and_our_plans_do(qb: Any) -> None:
    for thing in (qb.ModelConfig(), qb.CoreId(qb.Cluster.Cluster0, qb.Core.Core0)):
        with pytest.raises(TypeError):
            pickle.dumps(thing)
        with pytest.raises(TypeError):
            copy.deepcopy(thing)
    plan = CorePlan("single", (0, 1))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_future_is_asked_once(qb: Any) -> None:
    error = caught(lambda: qb.Future().get())
    assert status_name(error) == "Future_NotValid"
    assert "asked for twice" in str(translate(error, "computing", "device", running=True))


def test_scales_are_not_bounds_checked(qb: Any) -> None:
    scale = qb.Scale(1.0, True, [])
    assert isinstance(scale[3], float)  # no IndexError: garbage


# ---- what it writes, and what is known of it


def run_quiet(code: str, **environment: str) -> str:
    """stdout and stderr of a process of its own."""
    folder = str(Path(importlib.import_module("qbruntime").__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", **environment}
    for name in (library.LOG_LEVEL, library.TIMEOUT):
        if name not in environment:
            env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    return done.stdout + done.stderr


OPEN = textwrap.dedent("""
    from lightning_npu.runtimes.mobilint import library
    {before}
    qb = library.load({limit})
    try: qb.Accelerator(99)
    except Exception: pass
""")


@needs_no_device
def test_log_lines_stay_off_stdout_unless_the_user_chose_them() -> None:
    loud = "import qbruntime as q\ntry: q.Accelerator(99)\nexcept Exception: pass"
    assert "Accelerator not created" in run_quiet(loud)  # else there is nothing to be kept off
    assert run_quiet(OPEN.format(before="", limit="")) == ""
    chosen = run_quiet(OPEN.format(before="", limit=""), QBRUNTIME_LOG_LEVEL="info")
    assert "Accelerator not created" in chosen
    imported = run_quiet(OPEN.format(before="import qbruntime", limit=""))
    assert "Accelerator not created" in imported


def test_the_time_limit_is_set_before_the_import_unless_the_user_did() -> None:
    show = OPEN.format(before="", limit="2.0") + "import os; print(os.environ['QBRUNTIME_NPU_TIMEOUT_MS'])"
    assert run_quiet(show).split()[-1] == "1800"
    assert run_quiet(show, QBRUNTIME_NPU_TIMEOUT_MS="77").split()[-1] == "77"


def test_nothing_of_ours_imports_it_before_a_device_is_opened() -> None:
    code = """
        import sys
        import lightning_npu as npu
        import lightning_npu.runtimes.mobilint
        npu.runtimes.available()
        from lightning_npu.doctor import examine
        examine()
        print([name for name in sys.modules if name.startswith("qbruntime")])
    """
    expected = "[]" if not DEVICE else "qbruntime"
    assert expected in run_quiet(textwrap.dedent(code))


def test_every_status_that_we_know_is_one_of_the_vendors(qb: Any) -> None:
    if numbers() < (1, 3):
        pytest.skip("names are not kept whole in the binary")
    binary = Path(importlib.import_module("qbruntime.qbruntime").__file__).read_bytes()
    missing = [name for name in STATUSES if name.encode() not in binary]
    newer = {"Acc_AmbiguousDevice", "Acc_DeviceNotFound", "Acc_UnknownDevice"} if numbers() < (1, 4) else set()
    assert set(missing) <= newer


def test_the_calls_that_we_make_fit_every_version(qb: Any) -> None:
    def fits(function: Any, *args: Any, **kwargs: Any) -> None:
        inspect.signature(function).bind(*args, **kwargs)

    fits(qb.Accelerator.__init__, None, *(("aries", 0) if library.has_names(qb) else (0,)))
    fits(qb.get_available_device_numbers, *(("aries",) if library.has_names(qb) else ()))
    fits(qb.Model.__init__, None, "path", qb.ModelConfig())
    fits(qb.Model.launch, None, None)
    fits(qb.Model.infer_hwc, None, [])
    fits(qb.Model.infer_async, None, [])
    asked = "core_mode target_cores model_input_shape model_output_shape model_input_data_type model_output_data_type"
    for name in ("dispose", *(f"get_{word}" for word in (*asked.split(), "input_scale", "output_scale"))):
        fits(getattr(qb.Model, name), None)
    fits(qb.ModelConfig.set_single_core_mode, None, core_ids=[])
    fits(qb.ModelConfig.set_global4_core_mode, None, [])
    fits(qb.set_log_level, None)
    assert getattr(qb.LogLevel, "Off", None) or qb.LogLevel.OFF


def test_the_fake_has_the_signatures_of_the_real_one(qb: Any) -> None:
    """Names, kinds and defaults of parameters, of everything that the fake has."""
    if numbers() != (1, 5):
        pytest.skip("the fake is of 1.5")
    fake = fake_module()
    compared = 0

    def plain(function: Any) -> list[tuple[str, Any, str]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, str(p.default).split(": ")[0]) for p in parameters]

    for name, thing in vars(fake).items():
        if name.startswith("_") or getattr(thing, "__module__", "") != "fake_qbruntime":
            continue
        real = getattr(qb, name)
        if inspect.isclass(thing):
            for method, function in vars(thing).items():
                public = not method.startswith("_") or method in ("__init__", "__getitem__")
                if inspect.isfunction(function) and public and not issubclass(thing, Exception):
                    assert plain(function) == plain(getattr(real, method)), f"{name}.{method}"
                    compared += 1
        elif inspect.isfunction(thing):
            assert plain(thing) == plain(real), name
            compared += 1
    assert compared >= 40
    enumerations = ("Cluster", "Core", "CoreMode", "DataType", "LogLevel")
    for name in enumerations:
        assert set(getattr(fake, name).__members__) == set(getattr(qb, name).__members__), name


def test_the_fake_cpp_layer_has_the_names_and_parameters_of_the_real_one(qb: Any) -> None:
    """pybind11 classes have no signatures, but their docstrings list every overload."""
    core, real = fake_module()._core, importlib.import_module("qbruntime.qbruntime")
    for name in ("Accelerator", "Model"):
        for method, function in vars(getattr(core, name)).items():
            if method.startswith("_") or not callable(function):
                continue
            if method in ("get_device_name", "get_device_names") and numbers() < (1, 4):
                continue
            text = getattr(getattr(real, name), method).__doc__
            count = len(inspect.signature(function).parameters)
            overloads = [line for line in text.splitlines() if f"{method}(self" in line]
            assert any(line.count(": ") - line.count("qbruntime.qbruntime: ") >= count for line in overloads), method
    for method in ("get", "wait_for"):
        assert getattr(real.FutureFloat, method).__doc__
    assert isinstance(vars(real.Model)["target_cores"], property)


# ---- the vendor's Python layer at work, over the fake C++ one


@pytest.fixture
def launched(board: Any, tmp_path: Path) -> Any:
    hold_encoder(board)
    path = tmp_path / "model.mxq"
    path.write_bytes(b".MXQ" + bytes(100))
    qb = library.load()
    model = LaunchedModel(qb, path, qb.ModelConfig(), 0)
    model.launch()
    yield model
    model.close()


def test_shapes_are_checked_as_documented(launched: Any, board: Any) -> None:
    image = np.ascontiguousarray(make_images(1)[0].permute(1, 2, 0).numpy())
    with launched.use() as model:
        right = model.infer_hwc([image])
        np.testing.assert_array_equal(model.infer_hwc(image)[0], right[0])
        np.testing.assert_array_equal(model.infer_hwc([image[None]])[0][0], right[0])  # a batch of one
        np.testing.assert_array_equal(model.infer_hwc([np.stack([image, image])])[1][1], right[1])
        chw = np.ascontiguousarray(image.transpose(2, 0, 1))
        for wrong in ([image, image], [image[0]], [image[None, None]], [image[:8]], [chw]):
            with pytest.raises(ValueError, match=r"Input shape is invalid\."):
                model.infer_hwc(wrong)
        with pytest.raises(Exception, match="Model_DtypeMismatched"):
            model.infer_hwc([image.astype(np.uint8)])
        with pytest.raises(Exception, match="Model_InvalidNPUDtype"):
            model.infer_hwc([image.astype(np.int8)])
        with pytest.raises(Exception, match="Model_AsyncPipelineNotAlive"):
            model.infer_async([image])


def test_asynchronous_calls_take_one_image_and_futures_answer_once(board: Any, tmp_path: Path) -> None:
    hold_encoder(board)
    path = tmp_path / "model.mxq"
    path.write_bytes(b".MXQ" + bytes(100))
    qb = library.load()
    launched = LaunchedModel(qb, path, configure(qb, CorePlan("single", (0,)), asynchronous=True), 0)
    launched.launch()
    image = np.ascontiguousarray(make_images(1)[0].permute(1, 2, 0).numpy())
    with launched.use() as model:
        future = model.infer_async([image])
        assert future.wait_for(5000) is True
        np.testing.assert_array_equal(future.get()[0], model.infer_hwc([image])[0])
        with pytest.raises(Exception, match="Future_NotValid"):
            future.get()
        with pytest.raises(Exception, match="Model_NotSupported"):
            model.infer_async([np.stack([image, image])])
    launched.close()


def test_unknown_failures_keep_their_text() -> None:
    strange = RuntimeError("Moon_Eclipse occurred.\nPlease visit")
    error = translate(strange, "computing", "Mobilint device 0")
    assert isinstance(error, npu.DeviceError)
    assert "Moon_Eclipse occurred. Please visit" in str(error)
    assert status_of(RuntimeError("Driver_SomethingNew occurred.")) is not None
    assert status_of(ValueError("Input shape is invalid.")) is None


@pytest.mark.parametrize("name", sorted(STATUSES))
def test_every_status_has_a_meaning_and_a_remedy(name: str) -> None:
    error = translate(RuntimeError(f"{name} occurred.\nPlease visit https://"), "launching", "Mobilint device 0")
    assert type(error) is STATUSES[name].kind
    assert name in error.what
    assert error.remedy
    assert f"{name} occurred." in str(error.got)
    running = translate(RuntimeError(f"{name} occurred."), "computing", "Mobilint device 0", running=True)
    assert type(running) is npu.DeviceError
