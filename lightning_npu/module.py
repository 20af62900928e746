"""``NPUFrozenModule``: an ``nn.Module`` whose forward pass runs outside of torch, on a runtime."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_npu import checkpoint, custom_op
from lightning_npu.artifact import Artifact
from lightning_npu.errors import DeviceError, InputError
from lightning_npu.failover import Failover, Failure, check_policy, flat_outputs
from lightning_npu.frozen import FrozenModule
from lightning_npu.remeasure import open_measured
from lightning_npu.runtimes.base import Runtime, check_choice
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Items, Leaf, Node
from lightning_npu.transfer import Exchange
from lightning_npu.worker import TIMEOUT_S, Pending, Worker

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightning_npu.lookahead import Ahead
    from lightning_npu.power.base import PowerSource


class NPUFrozenModule(FrozenModule):
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
            in FP32, on the device where it lies, until :meth:`close`; see :attr:`failure`. A device that cannot be
            opened at all is an error either way.
        timeout_s: the longest that one call to the device may take; after it the device counts as hung.
        runtime_options: further options of the runtime, such as ``{"threads": 2}`` for "onnx".

    Raises:
        ArtifactError: the artifact is missing, damaged or from a newer version.
        RuntimeUnavailableError: there is no such runtime, or it is for other artifacts.
        InputError: the runtime has no such options, or there is no reference for ``on_failure``.
    """

    _ahead: Ahead | None

    def __init__(
        self,
        artifact: str | Path | Artifact,
        *,
        runtime: str = "auto",
        device_index: int | None = None,
        tail: nn.Module | None = None,
        reference: nn.Module | None = None,
        on_failure: str = "raise",
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
        self._install(loaded.signature, loaded.structure, tail, reference, on_failure)
        self._connect(_worker(loaded, *self._choice))

    @classmethod
    def from_runtime(
        cls,
        runtime: Runtime,
        *,
        tail: nn.Module | None = None,
        reference: nn.Module | None = None,
        on_failure: str = "raise",
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
        module._install(CallSignature([]), Leaf(0), tail, reference, on_failure)
        module._take(runtime)
        module._connect(Worker(lambda: runtime, timeout_s=timeout_s))
        return module

    def _take(self, runtime: Runtime) -> None:
        """Inputs, outputs, signature and structure from a runtime without artifact."""
        leaves = [Leaf(index) for index in range(len(runtime.outputs))]
        plain: Node = leaves[0] if len(leaves) == 1 else Items(tuple, leaves)
        self._inputs, self._outputs = runtime.inputs, runtime.outputs
        self._signature = runtime.signature or CallSignature.positional([spec.name for spec in runtime.inputs])
        self._structure = runtime.structure or plain

    # ---- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode one batch; arguments and result as of the replaced module.

        Floating outputs have the autocast dtype where autocast is on, else :attr:`dtype`, and lie on the device of
        the first input. They never require grad.

        Raises:
            InputError: wrong count, structure, shape or dtype of inputs, or an input that requires grad.
            DeviceError: the device failed.
        """
        tensors = self._accept(args, kwargs)
        dtype = _output_dtype(tensors[0].device, self._dtype)
        if not torch.compiler.is_compiling():
            self._hold_frozen()
        if torch.compiler.is_compiling():
            outputs = custom_op.encode(tensors, self._handle, dtype)
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

    def encode(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Encode one batch by its flat inputs; flat outputs on the device of the first input."""
        place = tensors[0].device
        if self.failure is None:
            try:
                return self._finish(self._obtain(tensors), place, dtype)
            except DeviceError as error:
                if not self._fails_over(error):
                    raise
        return flat_outputs(self._structure, self._reference_value(tensors, place, dtype), len(self._outputs))

    def submit(self, *args: Any, **kwargs: Any) -> FeatureFuture:
        """Start encoding one batch and return at once; ``.result()`` gives what a call would have returned.

        The inputs must not be changed in place until then.
        """
        tensors = self._accept(args, kwargs)
        dtype = _output_dtype(tensors[0].device, self._dtype)
        pending = None if self.failure is not None else self.request(tensors)
        return FeatureFuture(self, pending, tensors, dtype)

    def _accept(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if not self._inputs:  # a runtime that learns from its first call
            self._worker.runtime.learn(args, kwargs)
            self._take(self._worker.runtime)
        tensors = self._signature.flatten(args, kwargs)
        for spec, tensor in zip(self._inputs, tensors, strict=True):
            spec.check(tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                _refuse_gradient(spec.name)
        return tensors

    # ---- asking ahead

    def attach(self, ahead: Ahead | None) -> None:
        """Answer calls from what ``ahead`` asked for, where it did; None ends that.

        Raises:
            InputError: another look-ahead is attached.
        """
        if ahead is not None and self._ahead is not None and self._ahead is not ahead:
            raise InputError(
                "Two look-aheads ask for the same NPUFrozenModule.",
                expected="one Prefetch per trainer, or one Lookahead at a time",
                remedy="remove one of them",
            )
        self._ahead = ahead

    def request(self, tensors: Sequence[Tensor], name: str = "") -> Pending:
        """Queue one batch by its flat inputs; errors call it ``name``."""
        for spec, tensor in zip(self._inputs, tensors, strict=True):
            spec.check(tensor)
        ready = self._exchange.to_host(tensors, self._inputs)
        return self._worker.submit(ready, name=name, pin=self._device.type == "cuda")

    @property
    def knows_inputs(self) -> bool:
        """Whether inputs are known: from the start, but for a runtime that learns from its first call."""
        return bool(self._inputs)

    def request_made(self, make: Callable[[], Any], name: str) -> Pending:
        """Queue one batch whose inputs the worker computes by ``make``: a tensor, a tuple or a dict of arguments."""

        def inputs() -> list[Tensor]:
            made = make()
            args, kwargs = ((), made) if isinstance(made, dict) else (made if isinstance(made, tuple) else (made,), {})
            flat = self._signature.flatten(args, kwargs)
            for spec, tensor in zip(self._inputs, flat, strict=True):
                spec.check(tensor)
            return self._exchange.to_host(flat, self._inputs)

        return self._worker.submit(inputs, name=name, pin=self._device.type == "cuda")

    @property
    def slots(self) -> int:
        """Batches that the device runs at once; opens it."""
        return 1 if self.failure is not None else self._worker.runtime.slots

    @property
    def host_threads(self) -> int:
        """Threads of this machine's processor that the device keeps busy; opens it."""
        return 0 if self.failure is not None else self._worker.runtime.host_threads

    @property
    def power_sources(self) -> Sequence[PowerSource]:
        """Sensors of the boards that the device is; opens it."""
        runtime = self._worker.runtime if self.failure is None else self._worker.current
        return () if runtime is None else runtime.power_sources()

    def remaining_s(self, pending: Pending) -> float:
        """About how long until a requested batch is ready, by the mean time of the batches before it."""
        return pending.remaining_s(self.batch_s)

    @property
    def batch_s(self) -> float:
        """Mean seconds that the device took per batch; 0.0 before the first."""
        counters = self._worker.counters
        return counters.busy_s / counters.batches if counters.batches else 0.0

    @staticmethod
    def same_input(made: Tensor, passed: Tensor) -> bool:
        """Whether a tensor on the host and one that was passed hold the same values, bit for bit."""
        if made.shape != passed.shape:
            return False
        if passed.dtype != made.dtype:  # the precision plugin converted what was passed
            return bool(torch.equal(made.to(passed.dtype).to(passed.device), passed))
        return bool(torch.equal(made.to(passed.device, non_blocking=True), passed))

    def _obtain(self, tensors: Sequence[Tensor]) -> Pending:
        """What was asked for ahead of time, else what is asked for now."""
        if self._ahead is not None:
            pending = self._ahead.redeem(self, tensors)
            if pending is not None:
                return pending
        return self.request(tensors)

    def _place(self, tensors: Sequence[Tensor]) -> torch.device:
        """Where outputs go: to the first input, or to the module where that input was kept off the device."""
        device = tensors[0].device
        return self._device if self._ahead is not None and self._ahead.keeps_on_host(tensors[0]) else device

    def _finish(self, pending: Pending, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        started = time.perf_counter()
        outputs = pending.result()
        waited_s = time.perf_counter() - started
        self._wait_s += waited_s
        if self._ahead is not None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in (*outputs, *pending.inputs()))
            self._ahead.waited(waited_s, self._worker.counters.idle_s, size)
        return self._exchange.from_host(outputs, device, dtype)

    def _encode_here(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> Any:
        """The FP32 head in torch, on the training device."""
        assert self.reference is not None
        assert self._ahead is not None
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, dict(kwargs)))
        with torch.no_grad(), self._ahead.balancer.encoding(device):
            value = self.reference(*args, **kwargs)
        value = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
        return value if self.tail is None else self._follow_up(value)

    # ---- when the device fails

    @property
    def failure(self) -> Failure | None:
        """How the device failed, where ``on_failure="reference"`` took over; None: it did not."""
        return self._failover.failure

    def _fails_over(self, error: DeviceError) -> bool:
        runtime = self._worker.current
        return self._failover.take_over(error, "the device" if runtime is None else runtime.device)

    def _by_reference(self, tensors: Sequence[Tensor], place: torch.device, dtype: torch.dtype) -> Any:
        value = self._reference_value(tensors, place, dtype)
        return value if self.tail is None else self._follow_up(value)

    def _reference_value(self, tensors: Sequence[Tensor], place: torch.device, dtype: torch.dtype) -> Any:
        assert self.reference is not None
        return self._failover.run(self.reference, self._signature, tensors, place=place, dtype=dtype)

    def _assemble(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        value = self._structure.build([*outputs, *tensors])
        return value if self.tail is None else self._follow_up(value)

    # ---- what it is

    @property
    def stats(self) -> dict[str, Any]:
        """Counters by name.

        ``calls``, ``samples``, ``run_s`` (the device was busy), ``wait_s`` (waited for it), ``copies``, and
        ``reference_calls``, computed by the reference after the device had failed.
        """
        counters = self._worker.counters
        return {
            "calls": counters.batches,
            "samples": counters.samples,
            "run_s": counters.busy_s,
            "wait_s": self._wait_s,
            "copies": dict(self._exchange.copies),
            "reference_calls": self._failover.calls,
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
    ) -> None:
        self._failover = Failover(on_failure)
        self._signature, self._structure = signature, structure
        self._freeze(tail, reference)
        self._exchange = Exchange()
        self._wait_s = 0.0
        self._ahead = None

    def _connect(self, worker: Worker) -> None:
        self._worker = worker
        self._handle = custom_op.register(self)


class FeatureFuture:
    """A batch that is being encoded."""

    def __init__(
        self, module: NPUFrozenModule, pending: Pending | None, tensors: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        self._module, self._pending, self._tensors, self._dtype = module, pending, tensors, dtype

    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return self._pending is None or self._pending.done()

    def result(self) -> Any:
        """What the call would have returned; waits for it. Asked twice, it gives the same tensors.

        Raises:
            DeviceError: the device failed.
        """
        module, place = self._module, self._tensors[0].device
        if self._pending is not None:
            try:
                return module._assemble(module._finish(self._pending, place, self._dtype), self._tensors)
            except DeviceError as error:
                if not module._fails_over(error):
                    raise
        return module._by_reference(self._tensors, place, self._dtype)


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


def _refuse_gradient(name: str) -> NoReturn:
    raise InputError(
        f"Input '{name}' requires grad, but an NPUFrozenModule has no backward pass: what lies before it would "
        "silently not be trained.",
        expected="inputs that do not require grad",
        remedy="freeze what comes before, or detach() the input if no gradient is wanted there",
    )
