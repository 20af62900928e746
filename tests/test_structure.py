"""Nested values become flat tensors and come back, and what does not fit is named."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_npu.errors import ArtifactError, InputError
from lightning_npu.places import leaf_names
from lightning_npu.signature import CallSignature
from lightning_npu.structure import Record, describe, node_from_json

Pair = namedtuple("Pair", ["first", "second"])

leaves = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3), st.builds(lambda: torch.zeros(1)))
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        fields = getattr(a, "_fields", None) == getattr(b, "_fields", None)
        kind = isinstance(b, list) == isinstance(a, list)
        return fields and kind and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(nested)
def test_describe_and_build_are_inverse(value: Any) -> None:
    node, tensors = describe(value)
    assert same(value, node.build(tensors))
    read_back = node_from_json(json.loads(json.dumps(node.to_json())))
    assert same(value, read_back.build(tensors))
    found: list[Tensor] = []
    read_back.flatten(value, "value", found)
    assert [id(t) for t in found] == [id(t) for t in tensors]
    assert len(leaf_names(read_back, "value")) == len(tensors)


def test_records_replace_dataclasses() -> None:
    @dataclass
    class Output:
        last_hidden_state: Tensor
        pooled: Tensor | None = None

    x = torch.zeros(2)
    built = describe(Output(x))[0].build([x])
    assert isinstance(built, Record)
    assert built.last_hidden_state is x
    assert built[0] is x
    assert built["last_hidden_state"] is x
    assert built.pooled is None  # a plain dataclass has all of its fields
    assert built.to_tuple() == (x, None)
    with pytest.raises(AttributeError, match="no field 'poled'"):
        _ = built.poled


def test_mapping_dataclasses_leave_out_what_is_none() -> None:
    @dataclass
    class ModelOutput(OrderedDict):  # as Hugging Face's
        last_hidden_state: Tensor
        attentions: Tensor | None = None

        def __post_init__(self) -> None:
            for field in fields(self):
                self[field.name] = getattr(self, field.name)

    x = torch.zeros(2)
    built = describe(ModelOutput(x))[0].build([x])
    assert built.to_tuple() == (x,)


class Mode(str, Enum):
    A = "a"
    B = "b"


@pytest.mark.parametrize(
    ("held", "other"),
    [(Mode.A, Mode.B), (float("inf"), 1.0), (float("nan"), 0.0), (np.float64(2.5), 2.0), (np.int64(3), np.int64(4))],
)
def test_values_that_json_lacks_are_recognised_again(held: Any, other: Any) -> None:
    def forward(x: Tensor, value: Any = None) -> None: ...

    recorded, _ = CallSignature.record(forward, (torch.zeros(1), held), {})
    again = CallSignature.from_json(json.loads(json.dumps(recorded.to_json(), allow_nan=False)))
    assert len(again.flatten((torch.zeros(1), held), {})) == 1
    with pytest.raises(InputError, match="Argument 'value' is not what the module was compiled for"):
        again.flatten((torch.zeros(1), other), {})
    assert recorded.arguments([torch.zeros(1)])[0][1] is held or isinstance(held, np.floating)


def test_arrays_are_named_by_their_shape() -> None:
    with pytest.raises(InputError, match=r"Argument 'images'(.|\n)*a ndarray of shape \[100, 100\]") as caught:
        signature().flatten((np.zeros((100, 100)), torch.zeros(1)), {})
    assert len(str(caught.value)) < 500
    with pytest.raises(InputError, match=r"Argument 'state' is an array(.|\n)*torch.as_tensor"):
        CallSignature.record(forward, (torch.zeros(1), np.zeros((2, 2))), {})


def test_keys_that_a_file_cannot_hold_are_refused() -> None:
    with pytest.raises(InputError, match=r"'images' holds a dict with keys(.|\n)*Mode"):
        CallSignature.record(forward, ({Mode.A: torch.zeros(1)}, torch.zeros(1)), {})


def test_a_tensor_that_occurs_twice_is_returned_twice() -> None:
    x = torch.zeros(1)
    node, tensors = describe({"a": x, "b": [x]}, merge=True)
    assert len(tensors) == 1
    built = node.build(tensors)
    assert built["a"] is built["b"][0]


def test_names_from_a_file_cannot_be_code() -> None:
    evil = {
        "kind": "namedtuple",
        "type": "x = 1; import os",
        "keys": ["a"],
        "items": [{"kind": "constant", "value": 1}],
    }
    with pytest.raises(ArtifactError, match="no identifiers"):
        node_from_json(evil)


def forward(images: Tensor, state: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, **rest: Any) -> None: ...


def signature() -> CallSignature:
    recorded, _ = CallSignature.record(forward, (torch.zeros(1), torch.ones(1)), {})
    return CallSignature.from_json(json.loads(json.dumps(recorded.to_json())))


def test_positional_and_keyword_calls_are_the_same() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    calls = [((a, b), {}), ((a,), {"state": b}), ((), {"state": b, "images": a}), ((a, b, None), {"scale": 1.0})]
    for args, kwargs in calls:
        assert [id(t) for t in signature().flatten(args, kwargs)] == [id(a), id(b)]
    assert signature().tensor_names() == ["images", "state"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.zeros(1),), {}, "Argument 'state' is missing"),
        ((torch.zeros(1), torch.zeros(1), None, 1), {}, "too many arguments"),
        ((torch.zeros(1),) * 3, {}, r"Argument 'mask' is not what the module was compiled for.\n  Expected: None"),
        ((torch.zeros(1),) * 2, {"scale": 2.0}, r"Argument 'scale' is not(.|\n)*Expected: 1.0(.|\n)*Got: 2.0"),
        ((torch.zeros(1), "text"), {}, r"Argument 'state'(.|\n)*Expected: a tensor\n  Got: 'text'"),
        ((torch.zeros(1),) * 2, {"unknown": 1}, r"Argument \*\*rest is not"),
    ],
)
def test_calls_that_do_not_fit_are_named(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        signature().flatten(args, kwargs)


def test_a_default_that_was_overridden_when_compiled_must_be_given() -> None:
    recorded, _ = CallSignature.record(forward, (torch.zeros(1),) * 2, {"scale": 3.0})
    with pytest.raises(InputError, match="Argument 'scale' is missing"):
        recorded.flatten((torch.zeros(1),) * 2, {})
    assert len(recorded.flatten((torch.zeros(1),) * 2, {"scale": 3.0})) == 2


def test_ordered_dicts_and_lists_match_their_kind_only() -> None:
    node, _ = describe(OrderedDict(a=torch.zeros(1)))
    with pytest.raises(InputError, match=r"a dict with \['a'\]"):
        node.flatten({"b": torch.zeros(1)}, "'batch'", [])
    node, _ = describe([torch.zeros(1)] * 2)
    with pytest.raises(InputError, match="a list of 2 items"):
        node.flatten([torch.zeros(1)], "'batch'", [])
