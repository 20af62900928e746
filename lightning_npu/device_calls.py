"""A frozen module's calls to its device: on the spot, asked for ahead of time, or by the reference where it failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from lightning_npu.errors import DeviceError, InputError
from lightning_npu.failover import Failover, Failure, flat_outputs
from lightning_npu.frozen import FrozenModule
from lightning_npu.runtimes.base import Runtime
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Items, Leaf, Node
from lightning_npu.tensor_spec import TensorSpec
from lightning_npu.transfer import Exchange
from lightning_npu.worker import Pending, Worker

if TYPE_CHECKING:
    from lightning_npu.forward_gradient.vjp import VectorJacobian
    from lightning_npu.lookahead import Ahead
    from lightning_npu.power.base import PowerSource


class DeviceModule(FrozenModule):
    """Abstract. Turns a call into flat tensors, has them encoded, and puts the result together."""

    _worker: Worker
    _exchange: Exchange
    _failover: Failover
    _signature: CallSignature
    _structure: Node
    _inputs: tuple[TensorSpec, ...]
    _outputs: tuple[TensorSpec, ...]
    _ahead: Ahead | None
    _gradient: VectorJacobian | None
    _wait_s: float

    def _take(self, runtime: Runtime) -> None:
        """Inputs, outputs, signature and structure from a runtime without artifact."""
        leaves = [Leaf(index) for index in range(len(runtime.outputs))]
        plain: Node = leaves[0] if len(leaves) == 1 else Items(tuple, leaves)
        self._inputs, self._outputs = runtime.inputs, runtime.outputs
        self._signature = runtime.signature or CallSignature.positional([spec.name for spec in runtime.inputs])
        self._structure = runtime.structure or plain

    # ---- calling

    def _accept(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if not self._inputs:  # a runtime that learns from its first call
            self._worker.runtime.learn(args, kwargs)
            self._take(self._worker.runtime)
        tensors = self._signature.flatten(args, kwargs)
        for spec, tensor in zip(self._inputs, tensors, strict=True):
            spec.check(tensor)
            if self._gradient is None and _wants_gradient(tensor):
                _refuse_gradient(spec.name)
            if not torch.compiler.is_compiling() and _has_tangent(tensor):
                _refuse_tangent(spec.name)
        return tensors

    def encode(self, tensors: Sequence[Tensor], dtype: torch.dtype, *, ahead: bool = True) -> list[Tensor]:
        """Encode one batch by its flat inputs; flat outputs on the device of the first input.

        ``ahead``: use what was asked for ahead of time, if it was; never so for what is computed from parameters.
        """
        place = tensors[0].device
        if self.failure is None:
            try:
                if ahead:
                    return self._finish(self._obtain(tensors), place, dtype)
                return self._exchange.from_host(self._wait(self.request(tensors)), place, dtype)
            except DeviceError as error:
                if not self._fails_over(error):
                    raise
        return self._reference_outputs(tensors, place, dtype)

    def vjp(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """An estimate of the loss's gradient per flat input, from that per flat output; see ``gradient``."""
        assert self._gradient is not None  # a call without it was refused
        return self._gradient.estimate(self, tensors, gradients, wanted)

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
        """Mean seconds that a batch takes the device, alone on the slots that it uses; 0.0 before the first."""
        counters = self._worker.counters
        return counters.alone_s / counters.batches if counters.batches else 0.0

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
        before_s = self._wait_s
        outputs = self._wait(pending)
        if self._ahead is not None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in (*outputs, *pending.inputs()))
            self._ahead.waited(self._wait_s - before_s, self._worker.counters.idle_s, size)
        return self._exchange.from_host(outputs, device, dtype)

    def _submit(self, ready: Sequence[Tensor], name: str) -> Pending:
        """Queue what lies on the host already, for outputs that stay there."""
        return self._worker.submit(ready, name=name)

    def _wait(self, pending: Pending) -> list[Tensor]:
        started = time.perf_counter()
        outputs = pending.result()
        self._wait_s += time.perf_counter() - started
        return outputs

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

    def _reference_outputs(self, tensors: Sequence[Tensor], place: torch.device, dtype: torch.dtype) -> list[Tensor]:
        value = self._reference_value(tensors, place, dtype)
        return flat_outputs(self._structure, value, len(self._outputs))

    def _assemble(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        value = self._structure.build([*outputs, *tensors])
        return value if self.tail is None else self._follow_up(value)


def _wants_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _refuse_gradient(name: str) -> NoReturn:
    raise InputError(
        f"Input '{name}' requires grad, but an NPUFrozenModule has no backward pass: what lies before it would "
        "silently not be trained.",
        expected="inputs that do not require grad",
        remedy="freeze what comes before, or detach() the input if no gradient is wanted there; to train what comes "
        "before, make the module with gradient='forward', which estimates the gradient from further forward calls "
        "(docs/forward_gradient.md)",
    )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _refuse_tangent(name: str) -> NoReturn:
    raise InputError(
        f"Input '{name}' carries a tangent, but an NPUFrozenModule has no forward-mode derivative: the result would "
        "silently depend on nothing.",
        expected="inputs without tangents (torch.func.jvp, torch.autograd.forward_ad)",
        remedy="call it outside of forward-mode differentiation; with gradient='forward' it has a backward pass",
    )
