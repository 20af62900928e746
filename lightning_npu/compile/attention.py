"""Attention as compilers for accelerators know it: linear projections, two matrix products and a softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_npu.errors import CompileError

MASKED = -1e4  # added to a score that a mask hides: its softmax is 0 in float32, and no infinity enters the graph
_PRODUCT_FORMS = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_REMEDY = "write this layer's attention with matmul and softmax, or cut the head before it"


class ExplicitAttention(TorchFunctionMode):
    """Within the block every attention is computed step by step, however the module calls it.

    ``nn.MultiheadAttention``, ``F.multi_head_attention_forward`` and ``F.scaled_dot_product_attention`` become one
    linear projection each for queries, keys and values, ``softmax(q @ k.T * scale + mask) @ v`` with four-dimensional
    operands (batch, heads, tokens, features), and a linear projection of the result. The module is not changed, its
    weights are used where they are. What comes out equals the original up to float32 rounding.

    Attributes:
        count: how many attentions were computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take the attention calls, pass on all others."""
        given = dict(kwargs or {})
        if func in _PRODUCT_FORMS:
            self.count += 1
            return _scaled_dot_product(*args, **given)
        if func is F.multi_head_attention_forward:
            self.count += 1
            return _multi_head(inspect.signature(func).bind(*args, **given))
        if func is _BATCH_NORM:  # what torch.export makes of it, which exporters of opset 17 do not know
            x, weight, bias, mean, var, momentum, eps = args
            return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps), x.new_empty(0), x.new_empty(0)
        if func is _UNSAFE_VIEW:
            return args[0].reshape(args[1])
        return func(*args, **given)


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """(batch, heads, L, E), (.., S, E), (.., S, V) -> (.., L, V), as the function of torch; dropout is off."""
    _refuse("enable_gqa", enable_gqa, "as many heads of keys and values as of queries")
    _refuse("dropout", dropout_p > 0, "no dropout: the module in eval mode")
    if is_causal:
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = lower if attn_mask is None else attn_mask
    mask = None if attn_mask is None else additive(attn_mask, hides=False)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query, key, value, mask, factor)[0]


def _multi_head(call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` on (tokens, batch, features), or (tokens, features) without a batch."""
    call.apply_defaults()
    given = call.arguments
    for name in ("bias_k", "bias_v", "static_k", "static_v"):
        _refuse(name, given[name] is not None, "keys and values from the inputs alone")
    _refuse("add_zero_attn", given["add_zero_attn"], "keys and values from the inputs alone")
    _refuse("dropout", given["training"] and given["dropout_p"] > 0, "the module in eval mode")
    query, key, value = given["query"], given["key"], given["value"]
    batched = query.ndim == 3
    if batched:
        same = key is query, value is key
        query = query.transpose(0, 1)
        key = query if same[0] else key.transpose(0, 1)
        value = key if same[1] else value.transpose(0, 1)
    else:
        query, key, value = query[None], key[None], value[None]
    heads = int(given["num_heads"])
    q, k, v = (
        _split(F.linear(tokens, weight, bias), heads)
        for tokens, (weight, bias) in zip((query, key, value), _projections(given), strict=True)
    )
    mask = _mask(given, heads)
    attended, weights = _attend(q, k, v, mask, q.shape[-1] ** -0.5)
    result = F.linear(attended.transpose(1, 2).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    if given["average_attn_weights"]:
        weights = weights.mean(dim=1)
    if not batched:
        return result[0], weights[0] if given["need_weights"] else None
    return result.transpose(0, 1), weights if given["need_weights"] else None


def _projections(given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor | None]]:
    bias = given["in_proj_bias"]
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if given["use_separate_proj_weight"]:
        weights = (given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"])
    else:
        weights = given["in_proj_weight"].chunk(3)
    return list(zip(weights, biases, strict=True))


def _mask(given: Mapping[str, Any], heads: int) -> Tensor | None:
    """The additive mask for scores (batch, heads, L, S); None if nothing is hidden."""
    mask: Tensor | None = given["attn_mask"]
    if mask is not None:
        mask = additive(mask, hides=True)
        if mask.ndim == 3:  # (batch * heads, L, S)
            mask = mask.reshape(-1, heads, *mask.shape[1:])
    padding = given["key_padding_mask"]
    if padding is not None:
        padding = additive(padding, hides=True)
        padding = padding[:, None, None, :] if padding.ndim == 2 else padding
        mask = padding if mask is None else mask + padding
    return mask


def additive(mask: Tensor, *, hides: bool) -> Tensor:
    """A mask as what is added to scores.

    Args:
        mask: boolean, or already additive.
        hides: whether True hides a score (``nn.MultiheadAttention``) or keeps it (``scaled_dot_product_attention``).
    """
    if mask.dtype == torch.bool:
        hidden = mask if hides else ~mask
        return torch.zeros(mask.shape, device=mask.device).masked_fill(hidden, MASKED)
    return mask.clamp_min(MASKED)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-2, -1)) * scale
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return weights @ v, weights


def _split(tokens: Tensor, heads: int) -> Tensor:
    """(batch, L, heads * E) -> (batch, heads, L, E)."""
    batch, length, _ = tokens.shape
    return tokens.reshape(batch, length, heads, -1).transpose(1, 2)


def _refuse(what: str, present: object, expected: str) -> None:
    if present:
        raise CompileError(
            f"This attention uses {what}, which has no explicit form here.", expected=expected, remedy=_REMEDY
        )
