"""A first-order optimizer beside forward gradients: it trains what follows, with true gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.evaluation import average_over_ranks, number_of


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


def differentiate(first_order: torch.optim.Optimizer, others: Sequence[Tensor], closure: Callable[[], Any]) -> bool:
    """One call of ``closure`` that leaves gradients in the parameters of ``first_order`` only.

    Args:
        first_order: the optimizer; it is not stepped.
        others: parameters that get no gradient in this call.
        closure: returns the loss; ``backward`` is called here if it has not done so itself, as Lightning's does.

    Returns:
        Whether the loss is finite, on all ranks. If not, the gradients are gone again.

    Raises:
        InputError: no gradient arrived, or the closure gives no number.
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
    finite = bool(torch.isfinite(average_over_ranks(number_of(loss).clone())))
    if not finite:
        first_order.zero_grad(set_to_none=True)
    return finite


def _reached(first_order: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(first_order))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
