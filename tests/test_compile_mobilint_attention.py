"""Attention written out equals torch's own, however a module calls it; what has no explicit form is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_npu.compile.attention import ExplicitAttention
from lightning_npu.errors import CompileError

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _no_fused_kernels() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def both(call: object, count: int = 1) -> tuple[object, object]:
    with torch.no_grad():
        original = call()
        with ExplicitAttention() as explicit:
            written_out = call()
    assert explicit.count == count
    return original, written_out


def mask_of(kind: str, rows: int, columns: int, generator: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    hidden = torch.rand(rows, columns, generator=generator) < 0.4
    hidden[:, 0] = False  # a row that sees nothing is NaN in torch
    return hidden if kind == "bool" else torch.randn(rows, columns, generator=generator).masked_fill(hidden, -torch.inf)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 4),
    features=st.integers(1, 5),
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    keys=st.integers(1, 6),
    batch_first=st.booleans(),
    bias=st.booleans(),
    mask=st.sampled_from(["none", "bool", "float"]),
    padding=st.booleans(),
    average=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_multihead_attention(
    heads: int, features: int, batch: int, queries: int, keys: int, batch_first: bool, bias: bool, mask: str,
    padding: bool, average: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    width = heads * features
    module = nn.MultiheadAttention(width, heads, bias=bias, batch_first=batch_first).eval()
    query, key = torch.randn(queries, batch, width), torch.randn(keys, batch, width)
    if batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    hidden = torch.rand(batch, keys, generator=generator) < 0.3
    hidden[:, 0] = False
    (first, weights), (second, others) = both(
        lambda: module(
            query,
            key,
            key * 0.5,
            attn_mask=mask_of(mask, queries, keys, torch.Generator().manual_seed(seed)),
            key_padding_mask=hidden if padding else None,
            average_attn_weights=average,
        )
    )
    torch.testing.assert_close(second, first, **TOLERANCE)
    torch.testing.assert_close(others, weights, **TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 6), st.integers(1, 8)),
    keys=st.integers(1, 6),
    kind=st.sampled_from(["none", "bool", "float", "causal"]),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 1000),
)
def test_scaled_dot_product_attention(
    shape: tuple[int, ...], keys: int, kind: str, scale: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(shape, generator=generator)
    key = torch.randn(*shape[:2], keys, shape[3], generator=generator)
    mask = mask_of("none" if kind == "causal" else kind, shape[2], keys, generator)
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # here True keeps
    first, second = both(
        lambda: F.scaled_dot_product_attention(query, key, key + 1, mask, is_causal=kind == "causal", scale=scale)
    )
    torch.testing.assert_close(second, first, **TOLERANCE)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_whole_encoder_of_torch(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, norm_first=norm_first, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    tokens = torch.randn(2, 7, 16)
    first, second = both(lambda: encoder(tokens), count=3)
    torch.testing.assert_close(second, first, **TOLERANCE)


def test_other_widths_of_keys_and_values_and_no_batch() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, kdim=5, vdim=3).eval()
    query, key, value = torch.randn(4, 8), torch.randn(6, 5), torch.randn(6, 3)
    (first, weights), (second, others) = both(lambda: module(query, key, value))
    torch.testing.assert_close(second, first, **TOLERANCE)
    torch.testing.assert_close(others, weights, **TOLERANCE)
    without, _ = both(lambda: module(query, key, value, need_weights=False))
    assert without[1] is None


def test_the_module_and_other_calls_are_left_alone() -> None:
    module = nn.MultiheadAttention(8, 2).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with ExplicitAttention() as explicit, torch.no_grad():
        x = F.relu(torch.randn(3, 1, 8))
        module(x, x, x)
    assert explicit.count == 1
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "bias_k"),
        (nn.MultiheadAttention(8, 2, add_zero_attn=True), "add_zero_attn"),
        (nn.MultiheadAttention(8, 2, dropout=0.5).train(), "dropout"),
    ],
)
def test_what_has_no_explicit_form_is_named(module: nn.Module, what: str) -> None:
    x = torch.randn(3, 1, 8)
    with ExplicitAttention(), pytest.raises(CompileError, match=f"uses {what}(.|\n)*What to do: write this layer"):
        module(x, x, x)


def test_grouped_queries_are_refused() -> None:
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with ExplicitAttention(), pytest.raises(CompileError, match="uses enable_gqa"):
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
