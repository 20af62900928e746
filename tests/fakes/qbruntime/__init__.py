"""A fake of ``qbruntime`` 1.5: its Python layer's behaviour and signatures, over a simulated board."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any, List, Optional, Sequence, Union  # noqa: UP035

import numpy as np

from . import _core
from ._core import Cluster, Core, CoreMode, DataType, fail
from ._core import QbRuntimeError as QbRuntimeError

__version__ = "v1.5.0"


class LogLevel(Enum):
    Debug, Info, Warn, Err, Fatal, Off = range(6)


class CoreId:
    def __init__(self, cluster: Cluster, core: Core):
        self.cluster, self.core = cluster, core

    def __eq__(self, other: Any) -> bool:
        return (self.cluster, self.core) == (other.cluster, other.core)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'CoreId' object")


class Scale:
    def __init__(
        self,
        scale: float,
        is_uniform: bool,
        scale_list: List[float],  # noqa: UP006
        zero_point: int = 0,
        is_asymmetric: bool = False,
        zero_points: Optional[List[int]] = None,  # noqa: UP006, UP045
    ):
        self.scale, self.is_uniform, self.scale_list = scale, is_uniform, scale_list
        self.zero_point, self.is_asymmetric, self.zero_points = zero_point, is_asymmetric, zero_points or []

    def __getitem__(self, i: int) -> float:
        return self.scale_list[i] if i < len(self.scale_list) else 1.4e-45  # no bounds check: garbage


class ModelConfig:
    """Setters answer False and log where they refuse, and leave everything as it was."""

    def __init__(self, num_cores: Optional[int] = None):  # noqa: UP045
        self._mode, self.core_ids, self.clusters = CoreMode.Auto, [], []
        self._async, self._slots = False, -1

    def set_auto_core_mode(self) -> bool:
        self._mode, self.core_ids, self.clusters, self._slots = CoreMode.Auto, [], [], -1
        return True

    def set_single_core_mode(self, num_cores=None, core_ids=None) -> bool:
        if core_ids is None:
            if num_cores < 1:
                return self._refuse(f"Invalid `num_cores` value: {num_cores}.")
            self._mode, self.core_ids = CoreMode.Single, []
            return True
        if not core_ids:
            return self._refuse("Invalid core IDs: `core_ids` must not be empty.")
        for core_id in core_ids:
            if core_id.cluster is Cluster.Error or core_id.core in (Core.All, Core.GlobalCore, Core.Error):
                return self._refuse("Invalid core ID.")
        unique: list[CoreId] = []
        unique += [core_id for core_id in core_ids if core_id not in unique]
        self._mode, self.core_ids = CoreMode.Single, unique
        return True

    def set_global4_core_mode(
        self,
        clusters: List[Cluster] = [Cluster.Cluster0, Cluster.Cluster1],  # noqa: B006, UP006
    ) -> bool:
        if not clusters or Cluster.Error in clusters:
            return self._refuse("Invalid clusters.")
        self._mode, self.clusters, self.core_ids = CoreMode.Global4, list(clusters), []
        return True

    def set_global8_core_mode(self) -> bool:
        self._mode, self.clusters, self.core_ids = CoreMode.Global8, [], []
        return True

    def set_multi_core_mode(
        self,
        clusters: List[Cluster] = [Cluster.Cluster0, Cluster.Cluster1],  # noqa: B006, UP006
    ) -> bool:
        if not clusters:
            return self._refuse("Invalid clusters.")
        self._mode, self.clusters = CoreMode.Multi, list(clusters)
        return True

    def set_async_pipeline_enabled(self, enable: bool) -> None:
        self._async = enable

    def get_async_pipeline_enabled(self) -> bool:
        return self._async

    def set_activation_slots(self, num: int) -> None:
        self._slots = num

    def get_activation_slots(self) -> int:
        return self._slots

    def get_core_mode(self) -> CoreMode:
        return self._mode

    def get_core_ids(self) -> List[CoreId]:  # noqa: UP006
        return list(self.core_ids)

    def get_clusters(self) -> List[Cluster]:  # noqa: UP006
        return list(self.clusters)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'ModelConfig' object")

    def _refuse(self, line: str) -> bool:
        fail("", line)
        return False


class Accelerator:
    def __init__(self, device_name="auto", dev_no=0):
        if isinstance(device_name, int):
            dev_no, device_name = device_name, "auto"
        self._accelerator = _core.Accelerator(device_name, dev_no)

    def get_device_name(self) -> str:
        return self._accelerator.get_device_name()


class Future:
    def __init__(
        self,
        _future: Optional[Union[_core.Future, _core.Future]] = None,  # noqa: UP007, UP045
        _inputs: Optional[List[np.ndarray]] = None,  # noqa: UP006, UP045
    ):
        self._future = _future if _future is not None else _core.Future()
        self._inputs = _inputs

    def wait_for(self, timeout_ms: int) -> bool:
        return self._future.wait_for(timeout_ms)

    def get(self) -> List[np.ndarray]:  # noqa: UP006
        return [np.asarray(output) for output in self._future.get()]


Arrays = Union[np.ndarray, List[np.ndarray]]  # noqa: UP006, UP007


class Model:
    def __init__(self, path: str, model_config: Optional[ModelConfig] = None):  # noqa: UP045
        self._model = _core.Model(path, model_config)

    def launch(self, acc: Accelerator) -> None:
        self._model.launch(acc._accelerator)
        self._acc = acc

    def dispose(self) -> None:
        self._model.dispose()
        self._acc = None

    def infer(
        self,
        inputs: Arrays,
        outputs: Optional[List[np.ndarray]] = None,  # noqa: UP006, UP045
        cache_size: int = 0,
        params: Optional[List[Any]] = None,  # noqa: UP006, UP045
    ) -> Optional[List[np.ndarray]]:  # noqa: UP006, UP045
        return self._infer(inputs, outputs, chw=True)

    def infer_hwc(
        self,
        inputs: Arrays,
        outputs: Optional[List[np.ndarray]] = None,  # noqa: UP006, UP045
        cache_size: int = 0,
        params: Optional[List[Any]] = None,  # noqa: UP006, UP045
    ) -> Optional[List[np.ndarray]]:  # noqa: UP006, UP045
        return self._infer(inputs, outputs, chw=False)

    def _infer(self, inputs: Any, outputs: Any, *, chw: bool) -> Any:
        assert outputs is None, "outputs= is a trap in the vendor's layer: never pass it"
        arrays = inputs if isinstance(inputs, list) else [inputs]
        arrays = _as_hwc(arrays, chw)
        return [np.asarray(output) for output in self._model.infer([np.ascontiguousarray(a) for a in arrays])]

    def infer_async(self, inputs: Arrays) -> Future:
        arrays = inputs if isinstance(inputs, list) else [inputs]
        arrays = [np.ascontiguousarray(a) for a in _as_hwc(arrays, True)]
        return Future(self._model.infer_async(arrays), arrays)

    def infer_speedrun(self) -> None:
        self._model.infer_speedrun()

    def get_core_mode(self) -> CoreMode:
        return self._model.get_core_mode()

    def get_target_cores(self) -> List[CoreId]:  # noqa: UP006
        return self._model.target_cores

    def get_device_names(self) -> List[str]:  # noqa: UP006
        return self._model.get_device_names()

    def get_model_input_shape(self) -> Any:
        return self._model.get_model_input_shape()

    def get_model_output_shape(self) -> Any:
        return self._model.get_model_output_shape()

    def get_input_scale(self) -> List[Scale]:  # noqa: UP006
        return self._model.get_input_scale()

    def get_output_scale(self) -> List[Scale]:  # noqa: UP006
        return self._model.get_output_scale()

    def get_model_input_data_type(self) -> DataType:
        return self._model.get_model_input_data_type()

    def get_model_output_data_type(self) -> DataType:
        return self._model.get_model_output_data_type()


def _as_hwc(arrays: Sequence[np.ndarray], chw: bool) -> list[np.ndarray]:
    """The vendor's rule: (H, W, C) or (N, H, W, C); where it does not fit, (C, H, W), turned on the host."""
    shapes = _core.board.inputs
    if len(arrays) == len(shapes):
        if all(_fits(a.shape, s) for a, s in zip(arrays, shapes, strict=True)):
            return list(arrays)
        if chw and all(_fits(a.shape, (s[2], s[0], s[1])) for a, s in zip(arrays, shapes, strict=True)):
            return [np.moveaxis(a, -3, -1) for a in arrays]
    raise ValueError("Input shape is invalid.")


def _fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return given == shape or (len(given) == len(shape) + 1 and given[1:] == shape)


def set_log_level(level: LogLevel):
    _core.Board.log_level = level.name


def get_model_summary(mxq_path: str) -> str:
    return ""


def get_available_devices() -> List[str]:  # noqa: UP006
    return ["aries-rb"] if _core.board.numbers else []


def get_available_device_numbers(device_name: str = "auto") -> List[int]:  # noqa: UP006
    return list(_core.board.numbers)


_core.board.native = sys.modules[__name__]
