"""Compares a split with the module it was made from, and finds the input sizes for which it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_npu.compile.split.parts import Head, Tail
from lightning_npu.compile.split.trace import FlatRoot, Traced
from lightning_npu.compile.trees import same_template, take_apart

Range = tuple[int, int | None]
"""Least and greatest size of an axis; None: any."""


class MismatchError(Exception):
    """The halves do not compute what the module computes."""


def check(root: FlatRoot, head: Head, tail: Tail, leaves: Sequence[torch.Tensor]) -> None:
    """Compares ``tail(*head(x))`` with ``module(x)``: structure, shapes, dtypes and values.

    Raises:
        MismatchError: they differ. (Rounding is let pass: some devices add in another order from call to call.)
    """
    wanted = root.call([leaf.clone() for leaf in leaves])
    given = tail(*head.flat_forward(*[leaf.clone() for leaf in leaves]))
    (template_a, a, names), (template_b, b, _) = take_apart(wanted, "output"), take_apart(given, "output")
    if not same_template(template_a, template_b):
        raise MismatchError(f"the halves return {template_b}, the module {template_a}")
    for name, x, y in zip(names, a, b, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise MismatchError(f"{name} is {y.dtype} {list(y.shape)}, from the module {x.dtype} {list(x.shape)}")
        exact = not (x.is_floating_point() or x.is_complex())
        if not (torch.equal(x, y) if exact else torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)):
            raise MismatchError(f"{name} differs from the module's by up to {(x.double() - y).abs().max().item():.3g}")


def larger_batch(root: FlatRoot, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Examples with at least two samples: ``torch.export`` takes a size of 1 for a constant.

    Axis 0 is doubled where it is 1 in all inputs, else axis 1 (sequences), if the module then runs.
    """
    for axis in (0, 1):
        if all(leaf.ndim > axis and leaf.shape[axis] == 1 for leaf in leaves):
            doubled = [torch.cat([leaf, leaf], axis) for leaf in leaves]
            if _runs(root, doubled):
                return doubled
    return leaves


def valid_sizes(
    root: FlatRoot, head: Head, tail: Tail, leaves: Sequence[torch.Tensor], traced: Traced
) -> tuple[tuple[Range, ...], ...]:
    """Per input and axis, the sizes for which the split holds.

    ``torch.export`` says most of it, but not whether a branch for a single sample was left out. So each free size is
    tried at 1 and at one more than in the example.
    """
    ranges: dict[str, Range] = {}
    for symbol in dict.fromkeys(str(s) for sizes in traced.sizes for s in sizes if not isinstance(s, int)):
        axes = [[a for a, s in enumerate(sizes) if str(s) == symbol] for sizes in traced.sizes]
        size = next(leaf.shape[own[0]] for leaf, own in zip(leaves, axes, strict=True) if own)
        least, most = traced.ranges.get(symbol, (1, None))
        if least <= 2:  # 2 is what torch.export assumes of every size, needed or not
            least = 1 if _holds(root, head, tail, _resized(leaves, axes, 1)) else 2
        if (most is None or most > size) and not _holds(root, head, tail, _resized(leaves, axes, size + 1)):
            least, most = size, size
        ranges[symbol] = (least, most)
    return tuple(tuple((s, s) if isinstance(s, int) else ranges[str(s)] for s in sizes) for sizes in traced.sizes)


def _resized(leaves: Sequence[torch.Tensor], axes: list[list[int]], size: int) -> list[torch.Tensor]:
    resized = []
    for leaf, own in zip(leaves, axes, strict=True):
        for axis in own:
            leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) % leaf.shape[axis])
        resized.append(leaf)
    return resized


def _holds(root: FlatRoot, head: Head, tail: Tail, leaves: list[torch.Tensor]) -> bool:
    try:
        check(root, head, tail, leaves)
    except Exception:  # a module that does not take this size, or a graph that does not
        return False
    return True


def _runs(root: FlatRoot, leaves: list[torch.Tensor]) -> bool:
    try:
        root.call(leaves)
    except Exception:  # whatever the module raises at this size
        return False
    return True
