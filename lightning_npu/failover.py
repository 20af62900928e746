"""What happens when a device fails in mid-run: the error is raised, or the FP32 head in torch takes over."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_npu.errors import InputError, NPUError
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Leaf, Node

log = logging.getLogger(__name__)

POLICIES = ("raise", "reference")


@dataclass(frozen=True)
class Failure:
    """How a device failed.

    Attributes:
        reason: the error, on one line.
        device: what failed, in words.
        time_s: ``time.monotonic()`` when it was seen.
        at: wall-clock seconds since the epoch, for display.
    """

    reason: str
    device: str
    time_s: float
    at: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def check_policy(policy: str, reference: nn.Module | None) -> None:
    """Refuse a policy that does not exist, or one that nothing can carry out.

    Raises:
        InputError: with what to write instead.
    """
    if policy not in POLICIES:
        raise InputError("on_failure is wrong.", expected=f"one of {POLICIES}", got=repr(policy))
    if policy == "reference" and reference is None:
        raise InputError(
            "on_failure='reference' needs the FP32 head in torch to take over.",
            expected="a reference",
            got="none",
            remedy="offload(..., on_failure='reference') keeps it, or pass reference=head",
        )


class Failover:
    """Remembers the failure of one module's device, and computes in its place.

    Args:
        policy: "raise" or "reference".

    Attributes:
        failure: the failure; None: the device has not failed.
        calls: batches that the reference computed in its place.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.failure: Failure | None = None
        self.calls = 0

    def take_over(self, error: NPUError, device: str) -> bool:
        """Note an error of the device; whether the reference computes from now on."""
        if self.policy != "reference":
            return False
        if self.failure is None:
            reason = error.one_line
            self.failure = Failure(reason, device, time.monotonic(), time.time())
            log.error(
                "%s failed; from this batch on the FP32 head in torch takes its place, and what is measured from here "
                "is not the device's. %s",
                device,
                reason,
            )
        return True

    def run(
        self,
        reference: nn.Module,
        signature: CallSignature,
        tensors: Sequence[Tensor],
        *,
        place: torch.device,
        dtype: torch.dtype,
    ) -> Any:
        """What the device would have returned, structured as the head's output.

        Computed without autocast in the dtype of the head's weights: FP32, unless the model was converted as a whole
        (``.half()``, "bf16-true").

        Args:
            reference: the FP32 head.
            signature: how it is called.
            tensors: the flat inputs.
            place: where the outputs go.
            dtype: of floating outputs.
        """
        self.calls += 1
        weight = next((p for p in reference.parameters()), None)
        home = place if weight is None else weight.device
        kind = torch.float32 if weight is None else weight.dtype

        def bring(tensor: Tensor) -> Tensor:
            return tensor.to(home, kind if tensor.is_floating_point() else tensor.dtype, non_blocking=True)

        def give(tensor: Tensor) -> Tensor:
            return tensor.to(place, dtype if tensor.is_floating_point() else tensor.dtype)

        args, kwargs = signature.arguments([bring(tensor) for tensor in tensors])
        with torch.no_grad(), torch.autocast(home.type, enabled=False):
            return tree_map_only(Tensor, give, reference(*args, **kwargs))


def flat_outputs(structure: Node, value: Any, count: int) -> list[Tensor]:
    """The outputs of a structured value in flat order; inputs that the structure hands through are left out."""
    found: list[Tensor] = []
    structure.flatten(value, "output", found)
    by_index = dict(zip(_indices(structure), found, strict=True))
    return [by_index[index] for index in range(count)]


def _indices(node: Node) -> list[int]:
    if isinstance(node, Leaf):
        return [node.index]
    return [index for item in getattr(node, "items", ()) for index in _indices(item)]
