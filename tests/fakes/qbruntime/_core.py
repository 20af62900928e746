"""A simulated ARIES board, in the place of the vendor's C++ layer: what was found of it in the real wheels.

``board`` says what is plugged in, what its MXQ computes, and which calls go wrong. Where the wheels do not tell how a
device behaves, the strictest behaviour that their documentation allows is taken.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b".MXQ"
Compute = Callable[[list[np.ndarray]], list[np.ndarray]]


class QbRuntimeError(RuntimeError):
    """The vendor's one exception class."""


def fail(status: str, line: str) -> Exception:
    """Log lines go to stdout; what happened is in the text of the exception alone."""
    if Board.log_level != "Off":
        print(f"E1130 23:57:23.908 28511 fake.cc:1] {line}", flush=True)
    url = "https://docs.mobilint.com/v1.5/doxygen/html_en/group__CPPAPI.html"
    return board.error(f"{status} occurred.\nPlease visit {url} for more details.")


class Cluster(enum.Enum):
    Cluster0 = 1 << 16
    Cluster1 = 2 << 16
    Error = 0x7FFF0000


class Core(enum.Enum):
    Core0, Core1, Core2, Core3, All, GlobalCore, Error = 1, 2, 3, 4, 0x100, 0x200, 0x7FFF


class CoreMode(enum.Enum):
    Single, Multi, Global, Global4, Global8, Auto, Error = range(7)


class DataType(enum.Enum):
    Float32, Float16, Int8, Uint8, BInt16, Error = range(6)


class Board:
    """What a test sets, and what it looks at afterwards.

    Attributes:
        numbers: devices that are plugged in.
        inputs, outputs: shapes (H, W, C) of the MXQ.
        input_type, output_type: names of data types.
        modes: core modes that the MXQ was compiled for.
        relocatable: MXQ version 7 or later, which may share cores.
        compute: one image's inputs to its outputs.
        fault: called with the number of the call; may raise, wait, or return other outputs.
        latency_s: of one image.
        launch_status, dispose_status: a status that launch() or dispose() fails with.
        garbage: "", or what more than one asynchronous call in flight gives: "garbage", "nan".
        native: the module whose enumerations and classes are given out.
        error: the exception class.
    """

    log_level = "Info"

    def __init__(self) -> None:
        self.numbers = [0]
        self.inputs: list[tuple[int, int, int]] = [(4, 4, 3)]
        self.outputs: list[tuple[int, int, int]] = [(1, 1, 3)]
        self.input_type, self.output_type = "Float32", "Float32"
        self.input_scale: list[Any] = []
        self.output_scale: list[Any] = []
        self.modes = ["Single"]
        self.cores = 8
        self.relocatable = True
        self.ignores_core_ids = False
        self.compute: Compute = lambda arrays: [arrays[0].astype(np.float32).mean((0, 1), keepdims=True)]
        self.fault: Callable[[int], Any] | None = None
        self.latency_s = 0.0
        self.launch_status = self.dispose_status = ""
        self.garbage = ""
        self.native: Any = None
        self.error: type[Exception] = QbRuntimeError
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.events: list[str] = []
        self.calls, self.running, self.most_running = 0, 0, 0
        self.in_flight, self.most_in_flight = 0, 0
        self.busy_cores: dict[int, set[tuple[int, int]]] = {}
        self.disposed_under_a_call = False
        self.seen: list[Any] = []
        self.opened_threads: set[str] = set()

    def hang(self) -> None:
        """Answer never, or when the test is over."""
        self.released.wait()

    def lose(self) -> None:
        """Pull the plug."""
        self.numbers = []

    @contextlib.contextmanager
    def computing(self) -> Iterator[int]:
        with self.lock:
            number = self.calls
            self.calls += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            yield number
        finally:
            with self.lock:
                self.running -= 1


board = Board()


def reset() -> Board:
    """A new board; what hung on the old one is let go."""
    global board
    board.released.set()
    board = Board()
    Board.log_level = "Info"
    return board


class Accelerator:
    def __init__(self, device_name: Any = "auto", dev_no: int = 0) -> None:
        if isinstance(device_name, int):
            device_name, dev_no = "auto", device_name
        if not isinstance(device_name, str):
            raise TypeError("__init__(): incompatible constructor arguments.")
        if device_name.lower() not in ("auto", "aries", "aries-rb"):
            raise fail("Acc_UnknownDevice", f'Unknown or unsupported device "{device_name}".')
        if not board.numbers:
            status = "Driver_NotInitialized" if device_name == "aries-rb" else "Acc_DeviceNotFound"
            raise fail(status, "No NPU device found in the system.")
        visible = os.environ.get("QBRUNTIME_VISIBLE_DEVICES")
        if dev_no not in board.numbers or (visible is not None and str(dev_no) not in visible.split(",")):
            raise fail("Driver_NotInitialized", f"ARIES device #{dev_no} not found.")
        self.number, self._board = dev_no, board
        board.events.append(f"open {dev_no}")
        board.opened_threads.add(threading.current_thread().name)

    def get_device_name(self) -> str:
        return "aries-rb"

    def __del__(self) -> None:
        if hasattr(self, "_board"):
            self._board.events.append(f"close {self.number}")


class Future:
    """FutureFloat and FutureInt8: the result is there once."""

    def __init__(self, work: Callable[[], Any] | None = None) -> None:
        self._result: Any = None
        self._done = threading.Event()
        self._valid = work is not None
        if work is not None:
            threading.Thread(target=self._serve, args=(work,), daemon=True, name="fake-npu-pipeline").start()

    def _serve(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._result = error
        self._done.set()

    def wait_for(self, timeout_ms: int) -> bool:
        return self._done.wait(timeout_ms / 1000)

    def get(self) -> Any:
        if not self._valid:
            raise fail("Future_NotValid", "`Future::get` was called with an invalid future.")
        self._done.wait()
        self._valid = False
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Variant:
    def get_model_input_shape(self) -> list[tuple[int, int, int]]:
        return list(board.inputs)

    def get_model_output_shape(self) -> list[tuple[int, int, int]]:
        return list(board.outputs)


class Model:
    def __init__(self, path: str, config: Any = None) -> None:
        if not isinstance(path, str):
            raise TypeError("__init__(): incompatible constructor arguments.")
        self._path, self._board = path, board
        self._launched, self._running, self._acc = False, 0, None
        self._read()
        self.mode, self.cores, self._async, slots = _choice(config)
        self._slots = threading.Semaphore(slots)
        board.events.append("model")

    def _read(self) -> None:
        path = Path(self._path)
        if not path.is_file():
            line = f"Unable to load; No such file exists:'{path}'" if not path.is_dir() else "Is a directory"
            raise fail("Model_FailedToLoadMXQ", line)
        if path.read_bytes()[:4] != MAGIC:
            os.write(2, b"Unable to load; Invalid magic value detected. The MXQ file may be broken or corrupeted.\n")
            raise fail("Model_FailedToLoadMXQ", "Failed to load model.")

    def launch(self, acc: Accelerator) -> None:
        board = self._board
        self._read()  # the file is read again
        if board.launch_status:
            raise fail(board.launch_status, "launch failed")
        if self._launched:
            raise fail("Model_AlreadyLaunched", "launched already")
        taken = board.busy_cores.setdefault(acc.number, set())
        if not board.relocatable and taken & self.cores:
            raise fail("Acc_CoreAlreadyInUse", "core already in use")
        taken |= self.cores
        self._launched, self._acc = True, acc
        board.events.append("launch")

    def dispose(self) -> None:
        board = self._board
        if self._running:
            board.disposed_under_a_call = True
        if self._launched and board.dispose_status:
            self._launched = False
            raise fail(board.dispose_status, "ioctl failed")
        if self._launched:
            board.busy_cores[self._acc.number] -= self.cores
            board.events.append("dispose")
        self._launched, self._acc = False, None

    def __del__(self) -> None:
        if getattr(self, "_launched", False):
            self._board.events.append("destroyed while launched")

    # ---- what it is

    def get_model_input_shape(self) -> list[tuple[int, int, int]]:
        return list(board.inputs)

    def get_model_output_shape(self) -> list[tuple[int, int, int]]:
        return list(board.outputs)

    def get_num_model_variants(self) -> int:
        return 1

    def get_model_variant_handle(self, index: int) -> Variant:
        return Variant()

    def get_model_input_data_type(self) -> Any:
        return getattr(board.native.DataType, board.input_type)

    def get_model_output_data_type(self) -> Any:
        return getattr(board.native.DataType, board.output_type)

    def get_input_scale(self) -> list[Any]:
        return board.input_scale

    def get_output_scale(self) -> list[Any]:
        return board.output_scale

    def get_core_mode(self) -> Any:
        return getattr(board.native.CoreMode, self.mode)

    def get_device_names(self) -> list[str]:
        return ["aries-rb"]

    @property
    def target_cores(self) -> list[Any]:
        return [_native_id(cluster, core) for cluster, core in sorted(self.cores)]

    # ---- inference: the GIL is free while it runs

    def infer(self, arr: list[np.ndarray], cache_size: int = 0) -> list[np.ndarray]:
        return self._infer(arr)

    def infer_async(self, arr: list[np.ndarray]) -> Future:
        if not self._async:
            raise fail("Model_AsyncPipelineNotAlive", "the asynchronous pipeline is not enabled")
        if any(a.ndim == 4 and a.shape[0] > 1 for a in arr):
            raise fail("Model_NotSupported", "Batched inference is not supported for inferAsync")
        board = self._board
        with board.lock:
            board.in_flight += 1
            board.most_in_flight = max(board.most_in_flight, board.in_flight)

        def work() -> Any:
            try:
                outputs = self._infer(arr)
                many = board.most_in_flight > 1 and bool(board.garbage)
                if many:
                    value = float("nan") if board.garbage == "nan" else 7e9
                    outputs = [np.full_like(output, value) for output in outputs]
                return outputs
            finally:
                with board.lock:
                    board.in_flight -= 1

        return Future(work)

    def infer_speedrun(self) -> None:
        time.sleep(self._board.latency_s)

    def _infer(self, arr: list[np.ndarray]) -> list[np.ndarray]:
        board = self._board
        kinds = {"Float32": ("float32", "int8"), "Uint8": ("uint8",), "Int8": ("int8",)}[board.input_type]
        for array in arr:
            if array.dtype.name not in kinds:
                line = f"Invalid input data type - Input: {array.dtype.name}, Supported: {board.input_type}"
                raise fail("Model_DtypeMismatched", line)
        if arr[0].dtype.name == "int8" and board.output_type != "Int8":
            raise fail("Model_InvalidNPUDtype", "Int8 Output is not supported for a model with non-Int8 NPU DataType")
        if not self._launched:
            raise fail("Model_NotLaunched", "not launched")
        if self._acc.number not in board.numbers:
            raise fail("Driver_FailedToPostInfer", "ioctl failed")
        with self._slots, board.computing() as number:
            self._running += 1
            try:
                other = board.fault(number) if board.fault is not None else None
                if board.latency_s:
                    time.sleep(board.latency_s)
                if other is not None:
                    return other
                return self._compute(arr)
            finally:
                self._running -= 1

    def _compute(self, arr: list[np.ndarray]) -> list[np.ndarray]:
        board = self._board
        if arr[0].ndim == 4:
            images = [board.compute([array[index] for array in arr]) for index in range(arr[0].shape[0])]
            return [np.stack(parts) for parts in zip(*images, strict=True)]
        outputs = board.compute(arr)
        for output, shape in zip(outputs, board.outputs, strict=True):
            assert output.shape == shape, (output.shape, shape)
        return outputs


def _choice(config: Any) -> tuple[str, set[tuple[int, int]], bool, int]:
    """Mode, cores, whether asynchronous, and slots; refuses what the MXQ was not compiled for."""
    mode = "Auto" if config is None else config.get_core_mode().name
    everything = {(unit // 4, unit % 4) for unit in range(board.cores)}
    if mode == "Auto":
        if len(board.modes) > 1:
            raise fail("Model_MXQAndModelConfigNotMatch", "more than one core mode: choose one")
        mode = board.modes[0]
        cores = everything
    else:
        if mode not in board.modes:
            raise fail("Model_MXQAndModelConfigNotMatch", f"the MXQ was not compiled for {mode}")
        cores = everything
        if mode == "Single":
            cores = {(_digit(i.cluster.name), _digit(i.core.name)) for i in config.core_ids} or everything
        elif mode == "Global4":
            clusters = {_digit(c.name) for c in getattr(config, "clusters", None) or []}
            clusters |= {_digit(i.cluster.name) for i in config.core_ids}
            cores = {core for core in everything if core[0] in clusters}
        if board.ignores_core_ids:
            cores = everything
    units = {"Single": len(cores), "Global4": len({c for c, _ in cores})}.get(mode, 1)
    chosen = -1 if config is None else config.get_activation_slots()
    asynchronous = config is not None and config.get_async_pipeline_enabled()
    return mode, set(cores), asynchronous, chosen if chosen > 1 else 2 * units


def _digit(name: str) -> int:
    return int(name[-1])


def _native_id(cluster: int, core: int) -> Any:
    named = getattr(board.native.Cluster, f"Cluster{cluster}"), getattr(board.native.Core, f"Core{core}")
    if board.native.__name__.endswith("fake_qbruntime") or board.native.__name__ == "qbruntime":
        return board.native.CoreId(*named)
    made = board.native.CoreId()  # the vendor's C++ class
    made.cluster, made.core = named
    return made
