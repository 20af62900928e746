"""``NPUFrozenModule``: an ``nn.Module`` whose forward pass runs outside of torch, on a runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_npu import checkpoint, custom_op
from lightning_npu.artifact import Artifact
from lightning_npu.device_calls import DeviceModule, _wants_gradient
from lightning_npu.errors import DeviceError, InputError
from lightning_npu.failover import Failover, check_policy
from lightning_npu.forward_gradient.bridge import Bridge
from lightning_npu.forward_gradient.vjp import VectorJacobian
from lightning_npu.future import FeatureFuture
from lightning_npu.remeasure import open_measured
from lightning_npu.runtimes.base import Runtime, check_choice
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Leaf, Node
from lightning_npu.transfer import Exchange
from lightning_npu.worker import TIMEOUT_S, Worker

if TYPE_CHECKING:
    from typing_extensions import Self


class NPUFrozenModule(DeviceModule):
    """Stands in for a frozen module: same call signature, same output structure, no parameters.

    The device is opened on first use, once per process. The module stays in eval mode, keeps the artifact's
    fingerprint in checkpoints instead of weights, and can be copied, pickled and sent to spawned processes.

    Args:
        artifact: path of the artifact folder, or a loaded :class:`Artifact`.
        runtime: name of the runtime; "auto" takes the first that can execute the artifact here.
        device_index: which device, where the runtime has several.
        tail: what follows in torch where the original module was cut; called with the artifact's outputs. It is
            frozen, stays in eval mode, moves with ``.to`` and is not saved in checkpoints.
        reference: the FP32 head in torch, for ``Prefetch(balance=...)`` and ``on_failure``; frozen and not saved, like
            the tail.
        on_failure: "raise", or "reference": when the device fails, the reference takes over from that very batch on,
            in the precision of its weights, on the device where it lies, until :meth:`close`; see :attr:`failure`. A
            device that cannot be opened at all is an error either way.
        gradient: None: inputs that require grad are an error. "forward" or a :class:`forward_gradient.Bridge`: what
            lies before the module can be trained, by an estimate of the gradient from further forward calls.
        timeout_s: the longest that one call to the device may take; after it the device counts as hung.
        runtime_options: further options of the runtime, such as ``{"threads": 2}`` for "onnx".

    Raises:
        ArtifactError: the artifact is missing, damaged or from a newer version.
        RuntimeUnavailableError: there is no such runtime, or it is for other artifacts.
        InputError: the runtime has no such options, there is no reference for ``on_failure``, or ``gradient`` is wrong.
    """

    def __init__(
        self,
        artifact: str | Path | Artifact,
        *,
        runtime: str = "auto",
        device_index: int | None = None,
        tail: nn.Module | None = None,
        reference: nn.Module | None = None,
        on_failure: str = "raise",
        gradient: str | Bridge | None = None,
        timeout_s: float = TIMEOUT_S,
        runtime_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_policy(on_failure, reference)
        loaded = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
        self.artifact: Artifact | None = loaded
        options = dict(runtime_options or {})
        check_choice(loaded, runtime, device_index, options)
        self._choice = (runtime, device_index, timeout_s, options)
        self._fingerprint, self._inputs, self._outputs = loaded.fingerprint, loaded.inputs, loaded.outputs
        self._install(loaded.signature, loaded.structure, tail, reference, on_failure, gradient)
        self._connect(_worker(loaded, *self._choice))

    @classmethod
    def from_runtime(
        cls,
        runtime: Runtime,
        *,
        tail: nn.Module | None = None,
        reference: nn.Module | None = None,
        on_failure: str = "raise",
        gradient: str | Bridge | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> NPUFrozenModule:
        """Wrap an open runtime that has no artifact on disk, such as a simulated or a user-made one.

        The module takes the runtime's inputs as the runtime's ``signature`` says, or positionally, and returns what
        its ``structure`` says, or its one output or a tuple of its outputs.
        """
        check_policy(on_failure, reference)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.artifact = None
        module._choice = (runtime.name, None, timeout_s, {})
        module._fingerprint = runtime.fingerprint
        module._install(CallSignature([]), Leaf(0), tail, reference, on_failure, gradient)
        module._take(runtime)
        module._connect(Worker(lambda: runtime, timeout_s=timeout_s))
        return module

    # ---- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode one batch; arguments and result as of the replaced module.

        Floating outputs have the autocast dtype where autocast is on, else :attr:`dtype`, and lie on the device of
        the first input. They require grad where an input does and the module was made with ``gradient``; then the
        backward pass makes further calls. Where grad is off, nothing is different.

        Raises:
            InputError: wrong count, structure, shape or dtype of inputs, or an input that requires grad where there is
                no ``gradient``.
            DeviceError: the device failed.
        """
        tensors = self._accept(args, kwargs)
        dtype = _output_dtype(tensors[0].device, self._dtype)
        differentiable = any(map(_wants_gradient, tensors))
        if not torch.compiler.is_compiling():
            self._hold_frozen()
        if torch.compiler.is_compiling():
            outputs = custom_op.encode(tensors, self._handle, dtype, not differentiable)
        elif differentiable and self._gradient is not None:
            if self._ahead is not None:
                self._ahead.missed("requires_grad")
            outputs = self._gradient.encode(self, tensors, dtype)
        elif self.failure is not None:
            return self._by_reference(tensors, self._place(tensors), dtype)
        elif self._ahead is not None and self._ahead.encodes_here(self, tensors):
            return self._encode_here(args, kwargs, self._place(tensors), dtype)
        else:
            place = self._place(tensors)
            try:
                outputs = self._finish(self._obtain(tensors), place, dtype)
            except DeviceError as error:
                if not self._fails_over(error):
                    raise
                return self._by_reference(tensors, place, dtype)
        return self._assemble(outputs, tensors)

    def submit(self, *args: Any, **kwargs: Any) -> FeatureFuture:
        """Start encoding one batch and return at once; ``.result()`` gives what a call would have returned.

        The inputs must not be changed in place until then.

        Raises:
            InputError: inputs that do not fit, or that require grad.
        """
        tensors = self._accept(args, kwargs)
        if any(map(_wants_gradient, tensors)):
            raise InputError(
                "submit() gives features without a gradient, and an input requires grad.",
                expected="inputs that do not require grad",
                remedy="call the module itself; it is differentiable",
            )
        dtype = _output_dtype(tensors[0].device, self._dtype)
        pending = None if self.failure is not None else self.request(tensors)
        return FeatureFuture(self, pending, tensors, dtype)

    # ---- what it is

    @property
    def differentiable(self) -> bool:
        """Whether what comes before it can be trained through it: it was made with ``gradient``."""
        return self._gradient is not None

    @property
    def stats(self) -> dict[str, Any]:
        """Counters by name.

        ``calls``, ``samples``, ``run_s`` (the device was busy), ``wait_s`` (waited for it), ``copies``, and
        ``reference_calls``, computed by the reference after the device had failed; with ``gradient``, under that name:
        what the backward passes took, and how good their estimates are.
        """
        counters = self._worker.counters
        return {
            "calls": counters.batches,
            "samples": counters.samples,
            "run_s": counters.busy_s,
            "wait_s": self._wait_s,
            "copies": dict(self._exchange.copies),
            "reference_calls": self._failover.calls,
            **({} if self._gradient is None else {"gradient": self._gradient.stats}),
        }

    def describe(self) -> dict[str, Any]:
        """What runs where, as primitives: artifact, precision, recipe, fidelity, runtime, device. Opens the device."""
        runtime = self._worker.runtime if self.failure is None else self._worker.current
        facts: dict[str, Any] = {"fingerprint": self.fingerprint, **({} if runtime is None else runtime.describe())}
        if self.failure is not None:
            facts["failure"] = {**self.failure.to_json(), "reference_calls": self._failover.calls}
        if self.artifact is not None:
            facts |= {
                "artifact": str(self.artifact.path),
                "target": self.artifact.target,
                "precision": self.artifact.precision,
                "recipe": self.artifact.manifest["recipe"]["name"],
                "fidelity": {name: figures.to_json() for name, figures in self.artifact.fidelity.items()},
                "source": {key: self.artifact.manifest["source"][key] for key in ("module", "cut", "parameters")},
            }
        return facts

    def extra_repr(self) -> str:
        """Artifact, precision and size of what is replaced, for ``print(model)``."""
        if self.artifact is None:
            return f"runtime={self._choice[0]!r}, fingerprint={self.fingerprint[:12]}"
        source = self.artifact.manifest["source"]
        return (
            f"{self.artifact.path.name}, precision={self.artifact.precision!r}, runtime={self._choice[0]!r}, "
            f"replaces {source['module'].rpartition('.')[2]} with {source['parameters']:,} parameters"
        )

    def close(self) -> None:
        """Release the device; the next call opens it again. Copies of this module share the device."""
        self._worker.close()
        self._failover.failure = None

    # ---- copies and processes

    def __getstate__(self) -> dict[str, Any]:
        if self.artifact is None:
            raise InputError(
                f"A module made from an open runtime ('{self._choice[0]}') cannot be pickled.",
                expected="a module made from an artifact",
                remedy="build it in the process that uses it, or use a strategy that forks instead of spawning",
            )
        state = self.__dict__.copy()
        for name in ("_worker", "_handle"):
            state.pop(name)
        state["_ahead"] = None
        state["artifact"] = str(self.artifact.path)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        loaded = Artifact.load(state["artifact"])
        self.artifact = loaded
        if loaded.fingerprint != self._fingerprint:
            checkpoint.refuse(self._fingerprint, loaded.fingerprint, f"The artifact at {loaded.path} was replaced.")
        self._connect(_worker(loaded, *self._choice))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares the artifact and the device with this module; a tail is copied."""
        import copy

        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        shared = ("artifact", "_worker", "_signature", "_structure", "_inputs", "_outputs")
        nn.Module.__init__(twin)
        for name, value in self.__dict__.items():
            if name not in (*shared, "_ahead"):
                twin.__dict__[name] = copy.deepcopy(value, memo)
        for name in shared:
            twin.__dict__[name] = self.__dict__[name]
        twin._ahead = None
        twin._connect(self._worker)
        return twin

    # ---- putting it together

    def _install(
        self,
        signature: CallSignature,
        structure: Node,
        tail: nn.Module | None,
        reference: nn.Module | None,
        on_failure: str,
        gradient: str | Bridge | None,
    ) -> None:
        options = Bridge.of(gradient)
        self._gradient = None if options is None else VectorJacobian(options)
        self._failover = Failover(on_failure)
        self._signature, self._structure = signature, structure
        self._freeze(tail, reference)
        self._exchange = Exchange()
        self._wait_s = 0.0
        self._ahead = None

    def _connect(self, worker: Worker) -> None:
        self._worker = worker
        self._handle = custom_op.register(self)


def _worker(
    artifact: Artifact, runtime: str, device_index: int | None, timeout_s: float, options: dict[str, Any]
) -> Worker:
    opener = functools.partial(
        open_measured, artifact, runtime, device_index=device_index, call_timeout_s=timeout_s, **options
    )
    return Worker(opener, timeout_s=timeout_s)


def _output_dtype(device: torch.device, declared: torch.dtype) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return declared
