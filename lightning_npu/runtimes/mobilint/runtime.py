"""Mobilint ARIES boards: one launched model per device, one thread with a blocking call per core."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lightning_npu.errors import ArtifactError, DeviceError, InputError
from lightning_npu.runtimes.base import Runtime
from lightning_npu.runtimes.mobilint import library
from lightning_npu.runtimes.mobilint.asynchronous import check_asynchronous, infer_async
from lightning_npu.runtimes.mobilint.cores import MODES, UNITS, CorePlan, configure, plan_cores, taken
from lightning_npu.runtimes.mobilint.errors import status_of, translate
from lightning_npu.runtimes.mobilint.layout import Port, open_ports
from lightning_npu.runtimes.mobilint.model import LaunchedModel
from lightning_npu.runtimes.mobilint.mxq import check_mxq
from lightning_npu.runtimes.mobilint.placement import choose, local_ranks
from lightning_npu.tensor_spec import TensorSpec, common_batch
from lightning_npu.worker import TIMEOUT_S

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact
    from lightning_npu.power.base import PowerSource

log = logging.getLogger(__name__)


class MobilintRuntime(Runtime):
    """An MXQ on a Mobilint ARIES board.

    A call computes one image: the device's batch is 1, and the engine's threads spread the images of a batch over
    the cores. Each thread makes a blocking call, which is how the vendor's documentation fills all cores.

    Made by :meth:`open`. Its options:

    - ``core_mode``: "single" (each of 8 cores computes an image), "global4" (each of 2 clusters does) or "global8"
      (all cores compute one image); "auto" and default: what the MXQ was compiled for, "single" where it holds all.
    - ``threads``: threads that call the device, up to two per core or cluster (the device has as many buffers);
      default: one, and two with ``asynchronous``.
    - ``asynchronous``: use the vendor's asynchronous call, if it proves right when the device is opened.
    - ``int8``: exchange INT8 with the device, converted here by the MXQ's scales: a quarter of the transfers. Only
      for networks whose outputs are INT8.
    - ``ranks_per_device``: processes that share this process' device; default: found out.
    - ``timeout_s``: ``QBRUNTIME_NPU_TIMEOUT_MS`` is set to nine tenths of it, unless it is set already.
    """

    name: ClassVar[str] = "mobilint"
    targets: ClassVar[tuple[str, ...]] = ("mobilint",)
    option_names: ClassVar[tuple[str, ...] | None] = (
        "core_mode", "threads", "asynchronous", "int8", "ranks_per_device", "timeout_s"
    )  # fmt: skip

    def __init__(
        self,
        model: LaunchedModel,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        *,
        number: int,
        plan: CorePlan,
        threads: int,
        asynchronous: bool,
        fingerprint: str,
    ) -> None:
        self._model, self._ports, self._answers = model, tuple(inputs), tuple(outputs)
        self.inputs = tuple(_one_image(port.spec) for port in inputs)
        self.outputs = tuple(_one_image(port.spec) for port in outputs)
        self.number, self.plan, self.asynchronous = number, plan, asynchronous
        self.slots, self.fingerprint = threads, fingerprint
        self.device = f"{model.device} ({plan.describe()}, qbruntime {library.installed_version() or 'unknown'})"
        self._lost: DeviceError | None = None

    @classmethod
    def available(cls) -> str:
        """``"ok ..."`` with devices and version, or what is missing; imports nothing where there is no device node."""
        reason = library.missing() or library.no_nodes()
        if reason is not None:
            return reason
        numbers = library.device_numbers(library.load())
        found = library.installed_version() or "of unknown version"
        if not numbers:
            nodes = ", ".join(library.device_nodes())
            return (
                f"qbruntime {found} may open none of {nodes or 'the devices'}: check their permissions and "
                f"{library.VISIBLE}, and that driver and qbruntime fit each other"
            )
        return f"ok: qbruntime {found}, ARIES device{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"

    @classmethod
    def check_options(cls, device_index: int | None, options: Mapping[str, Any]) -> None:
        """Refuse unknown options and wrong values; touches no driver."""
        super().check_options(device_index, options)
        mode = options.get("core_mode")
        if mode is not None and mode not in ("auto", *MODES):
            raise InputError(
                "core_mode is wrong.",
                expected=f"'auto' or one of {list(MODES)}",
                got=repr(mode),
                remedy="'multi' is left out because one model reaches a third of the speed in it" if mode == "multi"
                else "leave it out to take what the MXQ was compiled for",
            )  # fmt: skip
        for option, most in {"threads": 2 * max(UNITS.values()), "ranks_per_device": max(UNITS.values())}.items():
            value = options.get(option)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
                raise InputError(
                    f"{option} is wrong.", expected=f"None or a whole number from 1 to {most}", got=repr(value),
                    remedy="leave it out",
                )  # fmt: skip
        for option in ("asynchronous", "int8"):
            if not isinstance(options.get(option, False), bool):
                raise InputError(f"{option} is wrong.", expected="True or False", got=repr(options[option]))
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
            raise InputError("timeout_s is wrong.", expected="seconds, more than 0", got=repr(timeout_s))

    @classmethod
    def open(
        cls,
        artifact: Artifact,
        *,
        device_index: int | None = None,
        core_mode: str | None = None,
        threads: int | None = None,
        asynchronous: bool = False,
        int8: bool = False,
        ranks_per_device: int | None = None,
        timeout_s: float = TIMEOUT_S,
        **options: Any,
    ) -> MobilintRuntime:
        """Open the artifact's MXQ on a board; for the options see the class.

        Args:
            artifact: an artifact with target "mobilint".
            device_index: number of the device, as in ``/dev/aries0``; None: chosen by this process' local rank.
            core_mode: how cores work together.
            threads: threads that call the device.
            asynchronous: use the vendor's asynchronous call.
            int8: exchange INT8 with the device.
            ranks_per_device: processes that share the device.
            timeout_s: seconds that a call may take.
            **options: none are known.

        Raises:
            RuntimeUnavailableError: no package, driver or device, no room for this rank, or asynchronous calls that
                compute something else.
            ArtifactError: the MXQ is damaged, for another device, or is not what the manifest says.
            DeviceError: the device failed.
        """
        cls.check_options(
            device_index,
            {
                "core_mode": core_mode, "threads": threads, "asynchronous": asynchronous, "int8": int8,
                "ranks_per_device": ranks_per_device, "timeout_s": timeout_s, **options,
            },
        )  # fmt: skip
        section = artifact.manifest.get("mobilint")
        if section is None:
            raise ArtifactError(
                f"{artifact.path} holds no MXQ yet.",
                expected="an artifact that was finished with an MXQ of the vendor's compiler",
                remedy="lightning-npu compile --finish model.mxq, as the compile kit's README says, or runtime='onnx'",
            )
        path = artifact.file("mxq")
        check_mxq(path)
        module = library.load(timeout_s)
        place = choose(library.device_numbers(module), device_index, ranks_per_device, local_ranks())
        plan = plan_cores(section["core_mode"], None if core_mode == "auto" else core_mode, place)
        model = LaunchedModel(module, path, configure(module, plan, asynchronous=asynchronous), place.number)
        try:
            plan = taken(module, model.vendor, plan)
            inputs, outputs = open_ports(artifact, section, model.vendor, int8=int8)
            most = 2 * plan.slots
            count = min(most, threads or (most if asynchronous else plan.slots))
            model.launch()
            if asynchronous:
                _check(model, inputs, count)
        except BaseException:
            model.close()
            raise
        opened = cls(
            model, inputs, outputs, number=place.number, plan=plan, threads=count, asynchronous=asynchronous,
            fingerprint=artifact.fingerprint,
        )  # fmt: skip
        log.info("%s computes on %s with %d threads", artifact.path.name, opened.device, count)
        return opened

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Compute the images of one batch, one after the other; see :meth:`Runtime.run`."""
        if self._lost is not None:
            raise copy.copy(self._lost)
        batch = common_batch(self.inputs, inputs)
        count = 1 if batch is None else batch
        results = [port.empty(count) for port in self._answers] if out is None else list(out)
        images = [port.images(tensor, count) for port, tensor in zip(self._ports, inputs, strict=True)]
        for index in range(count):
            answers = self._infer([arrays[index] for arrays in images])
            for port, answer, result in zip(self._answers, answers, results, strict=True):
                port.place(answer, result, index)
        return results

    def power_sources(self) -> Sequence[PowerSource]:
        """The board of this device."""
        from lightning_npu.power.mobilint import MobilintSource

        return (MobilintSource([self.number]),)

    def describe(self) -> dict[str, Any]:
        """Also core mode, cores or clusters, and how the device is called."""
        return {
            **super().describe(),
            "device_index": self.number,
            "core_mode": self.plan.mode,
            "cores": list(self.plan.units),
            "asynchronous": self.asynchronous,
            "int8": any(port.quantization is not None for port in self._answers),
        }

    def close(self) -> None:
        """Release the device: at once, or when the calls that run have returned."""
        self._model.close()

    def _infer(self, arrays: list[Any]) -> list[Any]:
        with self._model.use() as model:
            try:
                answers = infer_async(model, arrays) if self.asynchronous else list(model.infer_hwc(arrays))
            except Exception as error:
                raise self._failed(error) from error
            finally:
                del model  # who keeps the error keeps this frame, and models must go before their accelerators
        if len(answers) != len(self._answers):
            raise DeviceError(
                f"{self.device} answered with another number of outputs than the artifact has.",
                expected=[port.spec.name for port in self._answers],
                got=f"{len(answers)} outputs",
                remedy="check driver and qbruntime with `lightning-npu doctor`; compile the module again",
            )
        return answers

    def _failed(self, error: Exception) -> DeviceError:
        translated = translate(error, "computing an image", self.device, running=True)
        assert isinstance(translated, DeviceError)
        status = status_of(error)
        if status is not None:
            error.with_traceback(None)  # its frames hold the vendor's model, too
        if status is not None and status.lost:  # later calls must not wait for a device that is gone
            self._lost = DeviceError(
                f"{self.device} was lost: {translated.what}",
                got=translated.got,
                remedy="call close() on the module; the next use opens the device again, if it is back",
            )
        return translated


def _one_image(spec: TensorSpec) -> TensorSpec:
    if spec.batch_axis is None:
        return spec
    shape = tuple(1 if axis == spec.batch_axis else size for axis, size in enumerate(spec.shape))
    return dataclasses.replace(spec, shape=shape)


def _check(model: LaunchedModel, ports: Sequence[Port], in_flight: int) -> None:
    with model.use() as vendor:
        try:
            check_asynchronous(vendor, ports, max(2, in_flight))
        except DeviceError:
            raise
        except RuntimeError as error:  # the vendor's; ours is no RuntimeError
            raise translate(error, "trying asynchronous calls", model.device) from error
