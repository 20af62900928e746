"""The embedded default: ONNX Runtime on the CPU, its threads capped so that torch is not starved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightning_npu.errors import ArtifactError, DeviceError, InputError, RuntimeUnavailableError
from lightning_npu.runtimes.base import Runtime
from lightning_npu.runtimes.cpu import available_cores, instruction_set
from lightning_npu.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact

_INSTALL = "pip install onnxruntime"
_MOST_THREADS = 1024
_STRANGER = "do not use this artifact; get it again from somebody you trust"


class OnnxRuntime(Runtime):
    """ONNX Runtime's CPU execution provider.

    Inputs are read where torch keeps them and outputs are handed over where ONNX Runtime put them: no copy either
    way. Worker threads sleep between calls instead of spinning, because spinning threads slow the torch operations
    that follow (microsoft/onnxruntime#13808).

    Args:
        model: path of an ONNX file.
        inputs: what the graph takes, in order.
        outputs: what the graph gives, in order.
        fingerprint: identity of what the graph computes.
        threads: threads of one call; default: half of the cores that this process may use, so that torch keeps
            the other half.

    Raises:
        RuntimeUnavailableError: onnxruntime is not installed.
        ArtifactError: ONNX Runtime cannot load the file, or it reads weights from another file.
        InputError: a wrong number of threads.
    """

    name: ClassVar[str] = "onnx"
    targets: ClassVar[tuple[str, ...]] = ("onnx", "mobilint")
    option_names: ClassVar[tuple[str, ...] | None] = ("threads",)

    def __init__(
        self,
        model: str | Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        fingerprint: str = "",
        threads: int | None = None,
    ) -> None:
        _check_threads(threads)
        try:
            import onnxruntime
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"Runtime 'onnx' needs the package onnxruntime, which cannot be imported: {error}.", remedy=_INSTALL
            ) from error
        _refuse_external_data(Path(model))
        self.inputs, self.outputs, self.fingerprint = tuple(inputs), tuple(outputs), fingerprint
        self.threads = self.host_threads = threads or max(1, available_cores() // 2)
        self.device = f"CPU ({instruction_set()}, {self.threads} thread{'s' * (self.threads > 1)})"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.load_model_format", "ONNX")  # what was looked at, whatever its name
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(model), sess_options=options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises a dozen kinds, none with a common base
            raise ArtifactError(
                f"ONNX Runtime {onnxruntime.__version__} cannot load {model}: {error}",
                remedy="compile the module again, or update onnxruntime if the file is from a newer version",
            ) from error
        self._input_names = [spec.name for spec in self.inputs]
        self._output_names = [spec.name for spec in self.outputs]

    @classmethod
    def available(cls) -> str:
        """``"ok ..."`` with version and instruction set, or that onnxruntime is missing."""
        if find_spec("onnxruntime") is None:
            return f"the package onnxruntime is not installed: {_INSTALL}"
        try:
            installed = version("onnxruntime")
        except PackageNotFoundError:  # a build of another name, such as onnxruntime-gpu
            installed = "of unknown version"
        return f"ok: onnxruntime {installed} on the CPU ({instruction_set()}, {available_cores()} cores)"

    @classmethod
    def check_options(cls, device_index: int | None, options: Mapping[str, Any]) -> None:
        """Refuse unknown options, a number of threads that is none, and a second CPU."""
        super().check_options(device_index, options)
        _check_threads(options.get("threads"))
        if device_index not in (None, 0):
            raise RuntimeUnavailableError(
                "Runtime 'onnx' has one device, the CPU.",
                expected="device_index None or 0",
                got=device_index,
                remedy="leave device_index out",
            )

    @classmethod
    def open(
        cls, artifact: Artifact, *, device_index: int | None = None, threads: int | None = None, **options: Any
    ) -> OnnxRuntime:
        """Open the artifact's INT8 model on the CPU.

        Args:
            artifact: an artifact with target "onnx", or one for a device, which holds the ONNX model beside its own.
            device_index: None or 0: there is one CPU.
            threads: threads of one call.
            **options: none are known.
        """
        cls.check_options(device_index, {"threads": threads, **options})
        foreign = artifact.target != cls.targets[0]  # near to what the device computes, not equal
        fingerprint = f"{cls.name}:{artifact.fingerprint}" if foreign else artifact.fingerprint
        return cls(artifact.file("model"), artifact.inputs, artifact.outputs, fingerprint=fingerprint, threads=threads)

    @classmethod
    def open_reference(cls, artifact: Artifact) -> OnnxRuntime:
        """Open the artifact's FP32 reference on the CPU, as what the INT8 model is compared to."""
        fingerprint = f"reference:{artifact.fingerprint}"
        return cls(artifact.file("reference"), artifact.inputs, artifact.outputs, fingerprint=fingerprint)

    def run(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run one batch; see :meth:`Runtime.run`."""
        session = self._session
        if session is None:
            raise self.closed_error()
        arrays = [tensor.detach().numpy() for tensor in inputs]
        try:
            if out is not None:
                return self._run_into(session, arrays, out)
            feed = dict(zip(self._input_names, arrays, strict=True))
            return [torch.from_numpy(array) for array in session.run(self._output_names, feed)]
        except Exception as error:
            raise DeviceError(f"ONNX Runtime failed on {self.device}: {error}") from error

    def _run_into(self, session: Any, arrays: Sequence[Any], out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        binding = session.io_binding()
        for name, array in zip(self._input_names, arrays, strict=True):
            binding.bind_cpu_input(name, array)
        for name, tensor in zip(self._output_names, out, strict=True):
            element = tensor.numpy().dtype
            binding.bind_output(name, "cpu", 0, element, tuple(tensor.shape), tensor.data_ptr())
        session.run_with_iobinding(binding)
        return list(out)

    def close(self) -> None:
        """Free the session."""
        self._session = None


def _check_threads(threads: object) -> None:
    if threads is None:
        return
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= _MOST_THREADS:
        raise InputError(
            "The number of threads is wrong.",
            expected=f"None, or an integer from 1 to {_MOST_THREADS}",
            got=repr(threads),
            remedy="leave threads out to take half of the cores",
        )


def _refuse_external_data(path: Path) -> None:
    """A graph may name further files to read tensors from; one from outside could name any file of this machine.

    Wherever a tensor can be: among weights, in attributes, in subgraphs, in functions.
    """
    from onnx import ModelProto, TensorProto

    try:
        model = ModelProto.FromString(path.read_bytes())
    except Exception as error:  # protobuf's own DecodeError, or the file cannot be read
        raise ArtifactError(
            f"{path} is no ONNX model: {error}.",
            expected="a serialized ONNX ModelProto",
            remedy="copy the artifact again, or compile the module again",
        ) from error
    pending: list[Any] = [model]
    while pending:
        message = pending.pop()
        if isinstance(message, TensorProto) and (
            message.data_location == TensorProto.EXTERNAL or len(message.external_data)
        ):
            raise ArtifactError(
                f"{path} reads weights from another file.",
                expected="all weights inside the ONNX file",
                got=f"tensor '{message.name}' lies outside",
                remedy=_STRANGER,
            )
        for field, value in message.ListFields():
            if field.message_type is not None:
                pending.extend([value] if hasattr(value, "ListFields") else value)
