"""``Lookahead``: the same for a loop of one's own, or with Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_npu.balance import Balance, Balancer
from lightning_npu.errors import InputError
from lightning_npu.lookahead.ahead import Ahead, Inputs
from lightning_npu.lookahead.depth import Depth
from lightning_npu.lookahead.statistics import Statistics
from lightning_npu.lookahead.tags import leaves, replace_leaves
from lightning_npu.lookahead.view import view_of


class Lookahead:
    """A loader for a plain or Fabric loop, whose next batches are encoded while the current one trains.

    ::

        for images, actions in Lookahead(loader, model, device="cuda"):
            loss = model.loss(images, actions)

    Give it the loader from before ``fabric.setup_dataloaders`` and the device, or the loader from after it: in both
    cases the batches come out on the device. Use it as a context manager, or call :meth:`close`, to release the
    modules before it is collected.

    Args:
        loader: any iterable of batches.
        model: the model whose :class:`NPUFrozenModule` parts are asked ahead for.
        device: where to move the batches; None leaves them where the loader puts them.
        depth: how many batches to ask for ahead, as in :class:`lightning_npu.Prefetch`.
        inputs: as in :class:`lightning_npu.Prefetch`.
        balance: as in :class:`lightning_npu.Prefetch`.
        seed: as in :class:`lightning_npu.Prefetch`.

    Raises:
        InputError: the model has no frozen module, or another look-ahead has them.
    """

    def __init__(
        self,
        loader: Any,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        depth: int | str = "auto",
        inputs: Inputs | None = None,
        balance: Balance = "off",
        seed: int = 0,
    ) -> None:
        from lightning_npu.module import NPUFrozenModule

        modules = {name: m for name, m in model.named_modules() if isinstance(m, NPUFrozenModule)}
        if not modules:
            raise InputError(
                f"{type(model).__name__} has no NPUFrozenModule to look ahead for.",
                remedy="offload a submodule first: lightning_npu.offload(model, ...)",
            )
        self._device = None if device is None else torch.device(device)
        self._ahead = Ahead(modules, Depth(depth), inputs, Balancer(balance, seed=seed))
        self._view = view_of(loader, self._ahead)

    @property
    def statistics(self) -> Statistics:
        """Hits, misses by cause, seconds waited, queue depth."""
        return self._ahead.statistics

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[Any]:
        ahead = self._ahead
        for batch in self._view:
            ahead.device.clear()
            found = leaves(batch)
            tags = [ahead.host.pop(tensor) for tensor in found]
            with torch.inference_mode(False), torch.no_grad():
                moved = found if self._device is None else [t.to(self._device, non_blocking=True) for t in found]
            ahead.moved(tags, moved, ahead.device)
            yield batch if self._device is None else replace_leaves(batch, dict(enumerate(moved)))

    def close(self) -> None:
        """Drop what was asked for and leave the modules as they were."""
        self._view.retire()
        self._ahead.detach()

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
