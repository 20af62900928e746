"""A tensor's description goes to JSON and back, fits what it should, and says what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_npu.errors import ArtifactError, InputError
from lightning_npu.tensor_spec import DTYPES, TensorSpec, common_batch

IMAGES = TensorSpec("images", (None, 3, 8, 8), "float32", "NCHW")
TIME_FIRST = TensorSpec("tokens", (5, None, 2), "float32", "LNC", batch_axis=1)
SHARED = TensorSpec("position", (5, 2), "float32", "LC", batch_axis=None)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    shape: list[int | None] = list(draw(st.lists(st.integers(0, 4), max_size=4)))
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    if axis is not None and draw(st.booleans()):
        shape[axis] = None
    return TensorSpec(draw(st.text(min_size=1)), tuple(shape), draw(st.sampled_from(sorted(DTYPES))), "", axis)


@given(specs(), st.integers(0, 3))
def test_json_keeps_everything_and_matching_tensors_fit(spec: TensorSpec, batch: int) -> None:
    assert TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    tensor = torch.zeros(spec.with_batch(batch), dtype=spec.torch_dtype)
    spec.check(tensor)
    assert spec.samples(tensor) == (None if spec.batch_axis is None else tensor.shape[spec.batch_axis])
    assert spec.describe_shape().startswith("[")


def test_sizes_that_json_wrote_as_floats_are_integers() -> None:
    spec = TensorSpec.from_json({**IMAGES.to_json(), "shape": [None, 3.0, 8.0, 8], "batch_axis": 0.0})
    assert spec == IMAGES
    assert [type(size) for size in spec.shape[1:]] == [int] * 3
    assert type(spec.batch_axis) is int


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch_axis": 4},
            r"'images' has no axis 4(.|\n)*an axis of its shape \[None, 3, 8, 8\](.|\n)*copy the artifact",
        ),
        ({"batch_axis": -1}, r"'images' has no axis -1"),
        ({"shape": []}, r"'images' has no axis 0"),
        ({"dtype": "complex64"}, r"'images' has an unknown dtype(.|\n)*'float32'(.|\n)*Got: complex64"),
    ],
)
def test_a_description_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        TensorSpec.from_json({**IMAGES.to_json(), **change})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 3, 8), r"wrong shape(.|\n)*\[batch, 3, 8, 8\] \(NCHW\)(.|\n)*Got: \[2, 3, 8\]"),
        (torch.zeros(2, 3, 8, 9), r"wrong shape(.|\n)*Got: \[2, 3, 8, 9\]"),
        (
            torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
            r"wrong dtype(.|\n)*float32(.|\n)*Got: uint8(.|\n)*x.to\(torch.float32",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        IMAGES.check(tensor)


def test_floating_dtypes_stand_for_each_other_and_the_batch_is_free() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        IMAGES.check(torch.zeros(7, 3, 8, 8, dtype=dtype))
    TIME_FIRST.check(torch.zeros(5, 9, 2))


def test_batched_inputs_must_agree_and_shared_ones_need_not() -> None:
    images, tokens, shared = torch.zeros(4, 3, 8, 8), torch.zeros(5, 4, 2), torch.zeros(5, 2)
    assert common_batch([IMAGES, TIME_FIRST, SHARED], [images, tokens, shared]) == 4
    assert common_batch([SHARED], [shared]) is None
    with pytest.raises(InputError, match=r"disagree about the number of samples(.|\n)*images: 4, tokens: 3"):
        common_batch([IMAGES, TIME_FIRST], [images, torch.zeros(5, 3, 2)])
