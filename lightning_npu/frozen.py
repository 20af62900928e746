"""A module without weights of its own, in the life of an ``nn.Module``: modes, devices, dtypes, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_npu import checkpoint
from lightning_npu.artifact import Artifact
from lightning_npu.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightning_npu.forward_gradient.vjp import VectorJacobian


class FrozenModule(nn.Module):
    """Abstract. Stays in eval mode, cannot be trained, and leaves its identity in checkpoints instead of weights.

    Attributes:
        artifact: what it runs; None for one that was made from an open runtime.
        tail: what follows in torch; frozen, not saved.
        reference: the FP32 head in torch, where it is wanted; frozen, not saved.
    """

    artifact: Artifact | None
    tail: nn.Module | None
    reference: nn.Module | None
    _fingerprint: str
    _device: torch.device
    _dtype: torch.dtype
    _tail_state: dict[str, str]
    _gradient: VectorJacobian | None

    def _freeze(self, tail: nn.Module | None, reference: nn.Module | None) -> None:
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self.tail, self.reference = tail, reference
        checkpoint.freeze(reference)
        self._tail_state = checkpoint.freeze(tail)
        self.register_state_dict_post_hook(checkpoint.drop_frozen)  # type: ignore[no-untyped-call]
        super().train(False)

    @property
    def device(self) -> torch.device:
        """Where the module was moved to; outputs follow their inputs, not this."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of floating outputs outside of autocast: float32, or what ``.to(dtype)`` or ``.half()`` set."""
        return self._dtype

    @property
    def fingerprint(self) -> str:
        """Identity of what is computed; kept in checkpoints."""
        return self._fingerprint

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: the module is frozen."""
        return super().train(False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The tail's parameters; the offloaded head has none.

        Where there are none, iterating gives none, but ``next(module.parameters())``, which is often written to learn
        a device or dtype, raises an error that says what to use: a ``StopIteration`` would end the training without a
        word.
        """
        if recurse and (self.tail is not None or self.reference is not None):
            return super().parameters(recurse)
        return _NoParameters()

    def _hold_frozen(self) -> None:
        """A parent's ``requires_grad_(True)`` and ``unfreeze()`` reach the tail, past this module."""
        thawed = [p for part in (self.tail, self.reference) if part is not None for p in part.parameters()]
        thawed = [parameter for parameter in thawed if parameter.requires_grad]
        if thawed:
            for parameter in thawed:
                parameter.requires_grad = False
            warnings.warn(
                "The torch part of an NPUFrozenModule was unfrozen, by unfreeze() or requires_grad_(True) on a parent, "
                "and is frozen again: its weights are not saved in checkpoints, so training them would be lost.",
                stacklevel=4,
            )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse to unfreeze.

        Raises:
            InputError: ``requires_grad`` is True.
        """
        if requires_grad:
            raise InputError(
                "An NPUFrozenModule cannot be trained: its weights are compiled into an artifact.",
                expected="requires_grad_(False)",
                got="requires_grad_(True)",
                remedy="train the original module in torch, then offload it again",
            )
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps instead of weights: primitives only."""
        state = checkpoint.extra_state(self)
        return state if self._gradient is None else {**state, "gradient": self._gradient.state()}

    def set_extra_state(self, state: Any) -> None:
        """Refuse a checkpoint of another artifact or tail.

        Raises:
            ArtifactError: with both fingerprints.
        """
        checkpoint.compare(self, state)
        if self._gradient is not None and "gradient" in state:
            self._gradient.restore(state["gradient"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        checkpoint.load(self, state_dict, prefix)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # there is no parameter to tell where .to() and .half() lead; an empty tensor tells
        told = fn(torch.empty(0, dtype=self._dtype, device=self._device))
        self._device, self._dtype = told.device, told.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _follow_up(self, value: Any) -> Any:
        assert self.tail is not None
        return self.tail(*value) if isinstance(value, tuple) else self.tail(value)


class _NoParameters(Iterator[nn.Parameter]):
    """No parameters, and an answer to who asks for the first one."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(())

    def __next__(self) -> nn.Parameter:
        raise InputError(
            "An NPUFrozenModule has no parameters, so there is no first one.",
            expected="module.device and module.dtype",
            got="next(module.parameters())",
            remedy="write encoder.device or encoder.dtype, or ask another module of the policy",
        )
