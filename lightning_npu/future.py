"""A batch on its way through the device, as the caller of ``NPUFrozenModule.submit`` holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_npu.errors import DeviceError
from lightning_npu.worker import Pending

if TYPE_CHECKING:
    from lightning_npu.module import NPUFrozenModule


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
