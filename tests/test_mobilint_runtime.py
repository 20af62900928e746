# ruff: noqa: F811  # pytest fixtures are imported by name
"""Runtime 'mobilint': what crosses to the device and back, in order and laid out as it is there; which runtime runs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_encoder, make_images
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mobilint_parts import artifact, board, finish, make_mobilint, port, worker_of  # noqa: F401

import lightning_npu as npu
from lightning_npu.power import MobilintSource
from lightning_npu.remeasure import open_measured
from lightning_npu.runtimes import base
from lightning_npu.runtimes.mobilint import library
from lightning_npu.runtimes.mobilint.layout import Port, input_port, output_port
from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime
from lightning_npu.runtimes.mobilint.scales import quantization
from lightning_npu.tensor_spec import TensorSpec


def expected(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        tokens, summary = make_encoder()(images)
    return tokens, summary


def test_a_batch_is_spread_over_the_cores_and_comes_back_in_order(artifact: npu.Artifact, board: Any) -> None:
    board.latency_s = 0.02
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    images = make_images(19, seed=3)
    tokens, summary = module(images)
    right = expected(images)
    torch.testing.assert_close(tokens, right[0])
    torch.testing.assert_close(summary, right[1])
    assert 2 <= board.most_running <= 8
    assert module.stats["calls"] == 1
    assert module.stats["samples"] == 19
    module.close()
    assert board.events[-2:] == ["dispose", "close 0"]


def test_fidelity_is_measured_on_the_board_before_anything_is_computed(artifact: npu.Artifact, board: Any) -> None:
    board.compute = lambda arrays: [np.zeros((1, 16, 8), np.float32), np.zeros((1, 1, 8), np.float32)]
    strict = finish(artifact.path)
    manifest = {**strict.manifest, "fidelity": {**strict.manifest["fidelity"], "min_sqnr_db": 20.0}}
    from mobilint_parts import rewrite

    strict = rewrite(artifact.path, manifest)
    with pytest.raises(npu.FidelityError, match="Output 'output_0' of the compiled module"):
        open_measured(strict, "mobilint")
    assert board.events[-2:] == ["dispose", "close 0"]


def test_the_device_gets_height_width_channels(artifact: npu.Artifact, board: Any) -> None:
    seen: list[np.ndarray] = []
    compute = board.compute
    board.compute = lambda arrays: (seen.append(arrays[0].copy()), compute(arrays))[1]
    runtime = MobilintRuntime.open(artifact)
    image = make_images(1, seed=5)
    runtime.run([image])
    runtime.close()
    assert seen[0].shape == (16, 16, 3)
    np.testing.assert_array_equal(seen[0], image[0].permute(1, 2, 0).numpy())


def test_outputs_are_written_where_the_caller_wants_them(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact)
    images = make_images(3)
    out = [torch.full((3, 16, 8), -1.0), torch.full((3, 8), -1.0)]
    places = [tensor.data_ptr() for tensor in out]
    results = runtime.run([images], out)
    assert [tensor.data_ptr() for tensor in results] == places
    torch.testing.assert_close(out[0], expected(images)[0])
    first = runtime.run([images])[0]
    runtime.run([make_images(3, seed=9)])
    torch.testing.assert_close(first, expected(images)[0])  # no later call writes to it
    runtime.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outputs_lie_in_page_locked_memory(artifact: npu.Artifact, board: Any) -> None:
    worker = worker_of(MobilintRuntime.open(artifact))
    outputs = worker.submit([make_images(9)], pin=True).result()
    assert all(output.is_pinned() for output in outputs)
    torch.testing.assert_close(outputs[0], expected(make_images(9))[0])
    worker.close()


def test_one_model_is_launched_and_one_thread_per_core_calls_it(artifact: npu.Artifact, board: Any) -> None:
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    assert module.slots == 8
    assert [event for event in board.events if event in ("model", "launch")] == ["model", "launch"]
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-npu")]
    assert len(names) == 8
    module.close()


@pytest.mark.parametrize(
    ("compiled_for", "options", "slots", "words"),
    [
        ("single", {}, 8, "single, cores 0-7"),
        ("global4", {}, 2, "global4, clusters 0-1"),
        ("global8", {}, 1, "global8, all cores"),
        ("all", {}, 8, "single, cores 0-7"),
        ("global4", {"core_mode": "auto"}, 2, "global4, clusters 0-1"),
        ("all", {"core_mode": "global4"}, 2, "global4, clusters 0-1"),
        ("all", {"core_mode": "global8"}, 1, "global8, all cores"),
        ("single", {"core_mode": "single", "threads": 3}, 3, "single, cores 0-7"),
        ("global8", {"threads": 2}, 2, "global8, all cores"),
        ("global8", {"threads": 16}, 2, "global8, all cores"),
    ],
)
def test_core_modes(
    artifact: npu.Artifact, board: Any, compiled_for: str, options: dict[str, Any], slots: int, words: str
) -> None:
    board.modes = ["Single", "Global4", "Global8"] if compiled_for == "all" else [compiled_for.capitalize()]
    runtime = MobilintRuntime.open(finish(artifact.path, core_mode=compiled_for), **options)
    assert runtime.slots == slots
    assert words in runtime.device
    assert runtime.describe()["core_mode"] == words.partition(",")[0]
    runtime.close()


def test_an_mxq_for_fewer_cores_takes_fewer_threads(artifact: npu.Artifact, board: Any) -> None:
    board.cores = 4
    runtime = MobilintRuntime.open(artifact)
    assert (runtime.slots, runtime.plan.units) == (4, (0, 1, 2, 3))
    runtime.close()


def test_the_manifest_must_name_the_mode_of_the_mxq(artifact: npu.Artifact, board: Any) -> None:
    board.modes = ["Global8"]
    with pytest.raises(npu.ArtifactError, match=r"another core mode(.|\n)*Expected: single(.|\n)*Got: global8"):
        MobilintRuntime.open(artifact)
    assert board.events[-1] == "close 0"
    with pytest.raises(npu.ArtifactError, match="not compiled for core mode 'global4'"):
        MobilintRuntime.open(artifact, core_mode="global4")


@pytest.mark.parametrize(
    ("setter", "compiled_for", "call"),
    [
        ("set_auto_core_mode", "single", r"set_auto_core_mode\(\)"),
        ("set_single_core_mode", "all", r"set_single_core_mode\(core_ids=\[0, 1, 2"),
        ("set_global4_core_mode", "all", r"set_global4_core_mode\(\[0, 1\]\)"),
        ("set_global8_core_mode", "all", r"set_global8_core_mode\(\)"),
    ],
)
def test_a_setter_that_silently_refuses_is_an_error(
    artifact: npu.Artifact, board: Any, monkeypatch: pytest.MonkeyPatch, setter: str, compiled_for: str, call: str
) -> None:
    monkeypatch.setattr(library.load().ModelConfig, setter, lambda *args, **kwargs: False)
    mode = {"set_global4_core_mode": "global4", "set_global8_core_mode": "global8"}.get(setter)
    with pytest.raises(npu.DeviceError, match=rf"refused ModelConfig\.{call}(.|\n)*Expected: True(.|\n)*Got: False"):
        MobilintRuntime.open(finish(artifact.path, core_mode=compiled_for), core_mode=mode)


# ---- dtypes, tokens, several inputs and outputs


def make_port_artifact(artifact: npu.Artifact, tmp_path: Path, inputs: list[TensorSpec], outputs: list[TensorSpec],
                       section: dict[str, Any]) -> npu.Artifact:  # fmt: skip
    """An artifact object with other inputs and outputs; only its MXQ can be run."""
    manifest = {**artifact.manifest, "mobilint": {**artifact.manifest["mobilint"], **section}}
    return npu.Artifact(**{**vars(artifact), "manifest": manifest, "inputs": tuple(inputs), "outputs": tuple(outputs)})


def test_raw_frames_cross_the_bus_in_one_byte(artifact: npu.Artifact, board: Any, tmp_path: Path) -> None:
    board.inputs, board.outputs, board.input_type = [(4, 6, 3)], [(1, 1, 3)], "Uint8"
    kinds: list[str] = []
    board.compute = lambda arrays: (
        kinds.append(arrays[0].dtype.name),
        [arrays[0].astype(np.float32).mean((0, 1), keepdims=True)],
    )[1]
    frames = TensorSpec("frames", (None, 3, 4, 6), "uint8", "NCHW")
    means = TensorSpec("means", (None, 3), "float32", "NC")
    raw = make_port_artifact(
        artifact, tmp_path, [frames], [means],
        {"inputs": [port((4, 6, 3), "uint8")], "outputs": [{"shape": [1, 1, 3], "dtype": "float32"}]},
    )  # fmt: skip
    runtime = MobilintRuntime.open(raw)
    images = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8)
    worker = worker_of(runtime)
    result = worker.submit([images]).result()[0]
    torch.testing.assert_close(result, images.float().mean((2, 3)))
    assert set(kinds) == {"uint8"}
    worker.close()
    floats = make_port_artifact(artifact, tmp_path, [TensorSpec("frames", (None, 3, 4, 6))], [means], {
        "inputs": [port((4, 6, 3), "uint8")], "outputs": [{"shape": [1, 1, 3], "dtype": "float32"}],
    })  # fmt: skip
    with pytest.raises(npu.ArtifactError, match=r"'frames' as uint8, but the module takes float32"):
        MobilintRuntime.open(floats)


def test_the_mxqs_own_dtype_and_shape_are_asked(artifact: npu.Artifact, board: Any) -> None:
    board.input_type = "Uint8"
    with pytest.raises(npu.ArtifactError, match=r"another dtype than the artifact says(.|\n)*float32(.|\n)*Got: Uint8"):
        MobilintRuntime.open(artifact)
    board.input_type, board.inputs = "Float32", [(16, 3, 16)]
    with pytest.raises(npu.ArtifactError, match=r"another shape at 'images'(.|\n)*\[16, 16, 3\](.|\n)*\[16, 3, 16\]"):
        MobilintRuntime.open(artifact)
    board.inputs = [(-16, 16, 3)]
    with pytest.raises(npu.ArtifactError, match=r"negative sizes are variable(.|\n)*static shapes"):
        MobilintRuntime.open(artifact)
    board.inputs = [(16, 16, 3)] * 3
    with pytest.raises(npu.ArtifactError, match=r"another number of inputs(.|\n)*3 in the MXQ(.|\n)*had to split"):
        MobilintRuntime.open(artifact)
    assert "launch" not in board.events
    assert board.events.count("open 0") == board.events.count("close 0") == 4


def test_tokens_and_several_inputs_and_outputs(artifact: npu.Artifact, board: Any, tmp_path: Path) -> None:
    """As of an ACT encoder: an image, tokens with the batch in the middle, and one that all samples share."""
    board.inputs = [(2, 2, 3), (1, 5, 4), (1, 1, 4)]
    board.outputs = [(1, 5, 4), (2, 2, 3)]
    board.compute = lambda arrays: [arrays[1] * 2 + arrays[2], arrays[0] + 1]
    inputs = [
        TensorSpec("images", (None, 3, 2, 2), "float32", "NCHW"),
        TensorSpec("tokens", (5, None, 4), "float32", "LNC", batch_axis=1),
        TensorSpec("shared", (4,), "float32", "?", batch_axis=None),
    ]
    outputs = [
        TensorSpec("encoded", (5, None, 4), "float32", "LNC", batch_axis=1),
        TensorSpec("map", (None, 3, 2, 2), "float32", "NCHW"),
    ]
    act = make_port_artifact(
        artifact, tmp_path, inputs, outputs,
        {
            "inputs": [port(shape) for shape in board.inputs],
            "outputs": [{"shape": list(shape), "dtype": "float32"} for shape in board.outputs],
        },
    )  # fmt: skip
    worker = worker_of(MobilintRuntime.open(act))
    images, tokens, shared = torch.randn(7, 3, 2, 2), torch.randn(5, 7, 4), torch.randn(4)
    encoded, maps = worker.submit([images, tokens, shared]).result()
    torch.testing.assert_close(encoded, tokens * 2 + shared)
    torch.testing.assert_close(maps, images + 1)
    worker.close()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 4), channels=st.integers(1, 5), height=st.integers(1, 5), width=st.integers(1, 5),
    axis=st.integers(0, 3),
)  # fmt: skip
def test_layouts_are_inverse_to_each_other(count: int, channels: int, height: int, width: int, axis: int) -> None:
    shape: list[int | None] = [channels, height, width]
    shape.insert(axis, None)
    spec = TensorSpec("x", tuple(shape), batch_axis=axis, layout="?" * axis + "N" + "?" * (3 - axis))
    hwc = (height, width, channels)
    entry = {"layout": "HWC", "dtype": "float32", "shape": list(hwc)}
    there, back = input_port(spec, entry, hwc, "Float32", None), output_port(spec, entry, hwc, None)
    tensor = torch.randn([count if size is None else size for size in shape])
    images = there.images(tensor, count)
    assert {array.shape for array in images} == {hwc}
    assert all(array.flags["C_CONTIGUOUS"] for array in images)
    np.testing.assert_array_equal(images[0], tensor.select(axis, 0).permute(1, 2, 0).numpy())
    out = back.empty(count)
    for index, array in enumerate(images):
        back.place(array[None] if index % 2 else array, out, index)
    assert torch.equal(out, tensor)


def test_tensors_that_no_layout_explains_are_refused() -> None:
    spec = TensorSpec("x", (None, 3, 4, 5), layout="NCHW")
    with pytest.raises(npu.ArtifactError, match=r"'x' cannot be laid out(.|\n)*\[batch, 3, 4, 5\](.|\n)*\[5, 4, 3\]"):
        input_port(spec, port((5, 4, 3)), (5, 4, 3), "Float32", None)
    spec = TensorSpec("x", (None, 3), "int64")
    with pytest.raises(npu.ArtifactError, match="'x' is int64, which float32 does not hold exactly"):
        input_port(spec, port((1, 1, 3)), (1, 1, 3), "Float32", None)


# ---- INT8 on the bus


def scale(value: float = 1.0, values: Any = None, zero: int = 0, zeros: Any = None) -> Any:
    asymmetric = bool(zero) or zeros is not None
    return SimpleNamespace(
        scale=value, is_uniform=values is None, scale_list=values or [], zero_point=zero, is_asymmetric=asymmetric,
        zero_points=zeros or [],
    )  # fmt: skip


def test_int8_crosses_the_bus_and_is_converted_here(artifact: npu.Artifact, board: Any) -> None:
    board.output_type = "Int8"
    board.input_scale = [scale(1 / 64)]
    board.output_scale = [scale(values=[0.01 * (c + 1) for c in range(8)]), scale(0.05)]
    kinds = []

    def compute(arrays: list[np.ndarray]) -> list[np.ndarray]:
        kinds.append(arrays[0].dtype.name)
        return [np.full((1, 16, 8), 3, np.int8), np.full((1, 1, 8), -4, np.int8)]

    board.compute = compute
    runtime = MobilintRuntime.open(artifact, int8=True)
    tokens, summary = runtime.run([make_images(2)])
    assert kinds == ["int8", "int8"]
    torch.testing.assert_close(tokens[0, 0], torch.arange(1, 9) * 0.03)
    torch.testing.assert_close(summary, torch.full((2, 8), -0.2))
    assert runtime.describe()["int8"] is True
    runtime.close()


def test_int8_is_refused_where_outputs_are_wider(artifact: npu.Artifact, board: Any) -> None:
    with pytest.raises(npu.ArtifactError, match=r"outputs are INT8 on the device(.|\n)*Int8(.|\n)*Got: Float32"):
        MobilintRuntime.open(artifact, int8=True)
    board.output_type, board.input_scale = "Int8", [scale(1 / 64)]
    board.output_scale = [scale(values=[0.1] * 7), scale(0.1)]
    with pytest.raises(npu.ArtifactError, match=r"number of scales for 'output_0'(.|\n)*8(.|\n)*7 and 7"):
        MobilintRuntime.open(artifact, int8=True)
    assert board.events[-1] == "close 0"


@pytest.mark.parametrize(
    ("given_scale", "message"),
    [
        (scale(0.0), "scales for 'y' that are none"),
        (scale(float("nan")), "scales for 'y' that are none"),
        (scale(values=[0.1, -0.1]), "scales for 'y' that are none"),
        (scale(values=[0.1, 0.1, 0.1]), r"another number of scales for 'y'(.|\n)*2 scales(.|\n)*3 and 3"),
        (scale(values=[0.1, 0.1], zeros=[1]), r"2 and 1"),
        (scale(0.1, zero=200), "zero points for 'y' that INT8 does not reach"),
    ],
)
def test_scales_are_validated(given_scale: Any, message: str) -> None:
    with pytest.raises(npu.ArtifactError, match=message):
        quantization(given_scale, 2, "y")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(1e-3, 10), min_size=1, max_size=4), zero=st.integers(-128, 127), per=st.booleans())
def test_quantisation_is_undone_within_half_a_step(values: list[float], zero: int, per: bool) -> None:
    given_scale = scale(values=values, zeros=[zero] * len(values)) if per else scale(values[0], zero=zero)
    chosen = quantization(given_scale, len(values), "x")
    integers = torch.arange(-128, 128, dtype=torch.int8)[:, None].expand(-1, len(values))
    numbers = chosen.dequantize(integers)
    steps = torch.tensor(values if per else values[:1])
    torch.testing.assert_close(numbers, (integers.double() - zero).float() * steps)
    assert torch.equal(chosen.quantize(numbers), integers)


# ---- asynchronous calls


def test_asynchronous_calls_are_checked_and_then_used(artifact: npu.Artifact, board: Any) -> None:
    board.latency_s = 0.02
    runtime = MobilintRuntime.open(artifact, asynchronous=True)
    assert 2 < board.most_in_flight <= runtime.slots == 16
    board.most_in_flight = 0
    worker = worker_of(runtime)
    images = make_images(20)
    torch.testing.assert_close(worker.submit([images]).result()[0], expected(images)[0])
    assert board.most_in_flight > 1
    assert runtime.describe()["asynchronous"] is True
    worker.close()


@pytest.mark.parametrize(("garbage", "found"), [("nan", "NaN"), ("garbage", "differences of up to 7e")])
def test_asynchronous_garbage_is_found_at_start(artifact: npu.Artifact, board: Any, garbage: str, found: str) -> None:
    board.garbage = garbage
    with pytest.raises(
        npu.RuntimeUnavailableError, match=rf"compute something else(.|\n)*Got: {found}(.|\n)*leave asynchronous out"
    ):
        MobilintRuntime.open(artifact, asynchronous=True)
    assert board.events[-2:] == ["dispose", "close 0"]
    runtime = MobilintRuntime.open(artifact)  # synchronous calls do not suffer
    torch.testing.assert_close(runtime.run([make_images(2)])[0], expected(make_images(2))[0])
    runtime.close()


# ---- choice of runtime


def test_auto_takes_the_board_where_there_is_one(artifact: npu.Artifact, board: Any) -> None:
    module = npu.NPUFrozenModule(artifact)
    module(make_images(2))
    facts = module.describe()
    assert (facts["runtime"], facts["target"]) == ("mobilint", "mobilint")
    assert facts["device"].startswith("Mobilint")
    assert "qbruntime" in facts["device"]
    module.close()


def test_auto_falls_back_to_the_onnx_model_and_says_so_once(
    artifact: npu.Artifact, board: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    compiled: npu.Artifact, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(library, "DEVICE_FOLDER", str(tmp_path / "empty"))
    base._say_once.cache_clear()
    images = make_images(3)
    with caplog.at_level(logging.WARNING):
        # options and device of the board do not stand in the way of the other runtime, whose own options count
        options = {"core_mode": "global4", "threads": 1}
        module = npu.NPUFrozenModule(artifact, device_index=1, runtime_options=options)
        result = module(images)
        module.close()
        module(images)
    lines = [record.getMessage() for record in caplog.records if "runs on runtime" in record.getMessage()]
    assert len(lines) == 1
    assert "encoder.npu runs on runtime 'onnx'" in lines[0]
    assert "no device node" in lines[0]
    facts = module.describe()
    assert (facts["runtime"], facts["target"]) == ("onnx", "mobilint")
    right = npu.NPUFrozenModule(compiled)
    torch.testing.assert_close(result[0], right(images)[0])
    module.close()
    right.close()


def test_an_option_of_nobody_is_still_refused(artifact: npu.Artifact) -> None:
    with pytest.raises(npu.InputError, match="no such options"):
        npu.NPUFrozenModule(artifact, runtime_options={"core_mood": "single"})


def test_the_workers_limit_reaches_the_vendors_library(
    artifact: npu.Artifact, board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    module = npu.NPUFrozenModule(artifact, timeout_s=10)
    module(make_images(1))
    assert os.environ[library.TIMEOUT] == "9000"
    module.close()
    module = npu.NPUFrozenModule(artifact, timeout_s=20)
    module(make_images(1))
    assert os.environ[library.TIMEOUT] == "18000"
    module.close()
    monkeypatch.setenv(library.TIMEOUT, "123")
    module = npu.NPUFrozenModule(artifact, timeout_s=10)
    module(make_images(1))
    assert os.environ[library.TIMEOUT] == "123"
    module.close()
    monkeypatch.delenv(library.TIMEOUT)


def test_its_board_is_its_power_source(artifact: npu.Artifact, board: Any) -> None:
    board.numbers = [0, 1]
    runtime = MobilintRuntime.open(artifact, device_index=1)
    (source,) = runtime.power_sources()
    assert isinstance(source, MobilintSource)
    assert source.__reduce__()[1] == ((1,),)
    runtime.close()


WRONG = [
    ({"core_mode": "multi"}, r"core_mode is wrong(.|\n)*third of the speed"),
    ({"core_mode": "octo"}, r"core_mode is wrong(.|\n)*'single', 'global4', 'global8'(.|\n)*'octo'"),
    ({"threads": 0}, r"threads is wrong(.|\n)*1 to 16"),
    ({"threads": True}, r"threads is wrong"),
    ({"ranks_per_device": 9}, r"ranks_per_device is wrong(.|\n)*1 to 8"),
    ({"asynchronous": "yes"}, r"asynchronous is wrong(.|\n)*True or False(.|\n)*'yes'"),
    ({"int8": 1}, r"int8 is wrong"),
    ({"timeout_s": 0}, r"timeout_s is wrong(.|\n)*more than 0"),
    ({"cores": 4}, r"no such options(.|\n)*'core_mode'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_refused_before_a_device_is_opened(
    artifact: npu.Artifact, board: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(npu.InputError, match=message):
        npu.NPUFrozenModule(artifact, runtime="mobilint", runtime_options=options)
    with pytest.raises(npu.InputError, match=message):
        MobilintRuntime.open(artifact, **options)
    assert board.events == []


def test_an_artifact_without_mxq_says_how_to_finish_it(compiled: npu.Artifact, tmp_path: Path, board: Any) -> None:
    made = make_mobilint(compiled.path, tmp_path / "kit.npu")
    manifest = {key: value for key, value in made.manifest.items() if key != "mobilint"}
    unfinished = npu.Artifact(**{**vars(made), "manifest": manifest})
    with pytest.raises(npu.ArtifactError, match=r"holds no MXQ yet(.|\n)*compile --finish"):
        MobilintRuntime.open(unfinished)


def test_a_port_says_which_output_came_back_wrong() -> None:
    wrong = Port(TensorSpec("y", (None, 8)), (1, 1, 8), False, torch.float32)
    with pytest.raises(npu.DeviceError, match=r"output 'y'(.|\n)*\[1, 1, 8\] torch.float32(.|\n)*\[1, 2, 4\]"):
        wrong.place(np.zeros((1, 2, 4), np.float32), wrong.empty(1), 0)
