"""A simulated device: computes with torch and answers after a stated latency. For planning and for tests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_npu.errors import CompileError, DeviceError, InputError
from lightning_npu.hashing import state_digest, tensor_sha256
from lightning_npu.runtimes.base import Runtime

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact
    from lightning_npu.compile.flat import FlatModule
    from lightning_npu.power.base import PowerSource


class SimulatedRuntime(Runtime):
    """Stands for an accelerator of a stated speed and power. Nothing it reports is measured on a device.

    The features are those of ``module``, computed by torch on the CPU; the answer comes when the latency has passed,
    and the waiting takes no CPU. Calls are served by ``slots`` places, each one call at a time.

    Args:
        module: the FP32 module that the device would hold. Shapes and structure are taken from the first call.
        latency_s: seconds that one call takes, per batch whatever its size.
        jitter: sigma of a lognormal factor on the latency, whose median is 1.
        slots: calls that the device serves at once.
        active_w: board power in watts while at least one call runs.
        idle_w: board power in watts otherwise.
        replay: compute each distinct input once and from then on only wait, so that the simulated device takes no
            CPU from what is measured beside it.
        seed: of the jitter.

    Raises:
        InputError: a negative latency, jitter or power, or no slot.
    """

    name: ClassVar[str] = "simulated"
    targets: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        module: nn.Module,
        *,
        latency_s: float,
        jitter: float = 0.0,
        slots: int = 1,
        active_w: float = 0.0,
        idle_w: float = 0.0,
        replay: bool = False,
        seed: int = 0,
    ) -> None:
        for option, value in {
            "latency_s": latency_s, "jitter": jitter, "active_w": active_w, "idle_w": idle_w
        }.items():  # fmt: skip
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{option} is wrong.", expected="a finite number from 0 on", got=value)
        if slots < 1:
            raise InputError("A device needs a slot.", expected="slots of 1 or more", got=slots)
        self._module = module.eval()
        self._flat: FlatModule | None = None
        self.inputs, self.outputs = (), ()
        self.fingerprint = state_digest(module)
        self.latency_s, self.jitter, self.slots = latency_s, jitter, slots
        self.active_w, self.idle_w, self.replay = active_w, idle_w, replay
        self.device = f"simulated device ({latency_s * 1e3:g} ms, {slots} slot{'s' * (slots > 1)})"
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._known: dict[str, list[Tensor]] = {}
        self._served, self._active_since = 0, 0.0
        self._active_s, self._opened = 0.0, time.monotonic()
        self._closed = threading.Event()

    @classmethod
    def available(cls) -> str:
        """Always; it needs nothing."""
        return "ok: simulated, for planning and tests; made in code by SimulatedRuntime(module, ...)"

    @classmethod
    def open(cls, artifact: Artifact, *, device_index: int | None = None, **options: Any) -> Runtime:
        """Not from an artifact: a simulated device is made from a module, on purpose."""
        raise CompileError(
            "A simulated runtime is made from a module, not from an artifact.",
            remedy="use NPUFrozenModule.from_runtime(SimulatedRuntime(module, ...))",
        )

    def learn(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take shapes and structure from a call."""
        from torch.utils._pytree import tree_map_only

        from lightning_npu.compile.flat import FlatModule, tensor_specs
        from lightning_npu.compile.undisturbed import undisturbed

        kind = next((p.dtype for p in self._module.parameters() if p.is_floating_point()), torch.float32)

        def plain(tensor: Tensor) -> Tensor:  # as a device is fed: on the host, in the module's precision
            return tensor.detach().to("cpu", kind if tensor.is_floating_point() else tensor.dtype)

        example, kwexample = tree_map_only(Tensor, plain, (tuple(args), dict(kwargs)))
        with undisturbed(self._module), torch.autocast("cpu", enabled=False):
            flat = FlatModule(self._module, example, kwexample).eval()
            self.inputs, self.outputs = tensor_specs(flat)
        self.signature, self.structure, self._flat = flat.signature, flat.structure, flat

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Compute, and answer when the latency has passed."""
        if self._closed.is_set() or self._flat is None:
            raise self.closed_error()
        with self._lock:
            factor = self._factor()
            self._begin()
        ends = time.monotonic() + self.latency_s * factor
        try:
            results = self._compute(inputs)
            while (left_s := ends - time.monotonic()) > 0:
                if self._closed.wait(left_s):  # a real device would fail a call that is cut off, too
                    raise DeviceError(f"{self.device} was closed during a call.")
        finally:
            with self._lock:
                self._end()
        return results

    def energy_j(self) -> float:
        """Simulated joules since it was made: idle power always, active power beyond it while serving."""
        with self._lock:
            now = time.monotonic()
            active_s = self._active_s + (now - self._active_since if self._served else 0.0)
            return self.idle_w * (now - self._opened) + (self.active_w - self.idle_w) * active_s

    def power_w(self) -> float:
        """Simulated board power in watts at this moment."""
        with self._lock:
            return self.active_w if self._served else self.idle_w

    def power_sources(self) -> Sequence[PowerSource]:
        """Its own stated power; none where no power was stated, since that is not 0 W."""
        if not (self.active_w or self.idle_w):
            return ()
        from lightning_npu.power.simulated import SimulatedSource

        return (SimulatedSource.of_runtime(self),)

    def close(self) -> None:
        """End; calls in flight fail."""
        self._closed.set()

    def _compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        assert self._flat is not None
        key = "".join(tensor_sha256(tensor) for tensor in inputs) if self.replay else ""
        known = self._known.get(key)
        if known is None:
            with torch.no_grad():
                known = [tensor.detach().cpu().contiguous() for tensor in self._flat(*inputs)]
            if self.replay:
                self._known[key] = known
        return [tensor.clone() for tensor in known]

    def _factor(self) -> float:
        return float(np.exp(self._random.normal(0.0, self.jitter))) if self.jitter else 1.0

    def _begin(self) -> None:
        if self._served == 0:
            self._active_since = time.monotonic()
        self._served += 1

    def _end(self) -> None:
        self._served -= 1
        if self._served == 0:
            self._active_s += time.monotonic() - self._active_since
