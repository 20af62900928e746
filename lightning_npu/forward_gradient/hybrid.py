"""A first-order optimizer beside forward gradients: it trains what follows, with true gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_npu.errors import InputError


def require_disjoint(first_order: torch.optim.Optimizer, others: Sequence[Tensor]) -> None:
    """Refuse parameters that are in both.

    Raises:
        InputError: with their number; or ``first_order`` is no optimizer.
    """
    if not isinstance(first_order, torch.optim.Optimizer):
        raise InputError("first_order is wrong.", expected="a torch.optim.Optimizer", got=repr(first_order))
    others_by_id = {id(parameter) for parameter in others}
    both = sum(id(parameter) in others_by_id for parameter in _parameters(first_order))
    if both:
        raise InputError(
            "first_order trains parameters that ForwardGradient trains too.",
            expected="disjoint parameters",
            got=f"{both} in both",
            remedy="give each parameter to one of them",
        )


def step_first_order(first_order: torch.optim.Optimizer, others: Sequence[Tensor], closure: Callable[[], Any]) -> None:
    """One call of ``closure`` with gradients for the parameters of ``first_order`` only, and its step.

    Args:
        first_order: the optimizer.
        others: parameters that get no gradient in this call.
        closure: returns the loss; ``backward`` is called here if it has not done so itself, as Lightning's does.

    Raises:
        InputError: no gradient arrived.
    """
    first_order.zero_grad(set_to_none=True)
    frozen = [parameter for parameter in others if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            loss = closure()
        if isinstance(loss, Tensor) and loss.requires_grad and not _reached(first_order):
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    if not _reached(first_order):
        raise InputError(
            "No gradient reached the parameters of first_order.",
            expected="a loss that depends on them and is computed with gradients",
            got="a loss without graph",
            remedy="give parameters that follow the ones ForwardGradient trains, and no torch.no_grad() in the closure",
        )
    first_order.step()


def _reached(first_order: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(first_order))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
