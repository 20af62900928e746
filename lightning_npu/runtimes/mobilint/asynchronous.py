"""The vendor's asynchronous call, and the check without which it is not used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lightning_npu.errors import RuntimeUnavailableError
from lightning_npu.runtimes.mobilint.layout import Port

_ROUNDS = 4


def infer_async(model: Any, arrays: list[Any]) -> list[Any]:
    """One image through the asynchronous pipeline; several threads keep several in flight."""
    return list(model.infer_async(arrays).get())


def check_asynchronous(model: Any, ports: Sequence[Port], in_flight: int) -> None:
    """Make sure that several inferences in flight give what one at a time gives, bit for bit.

    Garbage with more than one in flight has been seen on a Transformer with an earlier version of the vendor's
    library, whose documentation names convolutional networks only.

    Args:
        model: the vendor's launched model.
        ports: its inputs.
        in_flight: how many inferences there will be at once.

    Raises:
        RuntimeUnavailableError: they differ.
    """
    random = np.random.default_rng(0)
    samples = [[_random(random, port) for port in ports] for _ in range(in_flight)]
    right = [list(model.infer_hwc(sample)) for sample in samples]
    for round_number in range(_ROUNDS):
        for index, (found, expected) in enumerate(zip(all_at_once(model, samples), right, strict=True)):
            if not _equal(found, expected):
                raise RuntimeUnavailableError(
                    f"Asynchronous calls compute something else on this device: image {index} of {in_flight} in "
                    f"flight, round {round_number + 1}.",
                    expected="the synchronous result, bit for bit",
                    got=_difference(found, expected),
                    remedy="leave asynchronous out; threads with synchronous calls keep all cores busy as well",
                )


def all_at_once(model: Any, samples: Sequence[list[Any]]) -> list[list[Any]]:
    """The results of all samples in flight together; none is in flight any more when this ends, however it ends."""
    futures: list[Any] = []
    results: list[list[Any]] = []
    try:
        for sample in samples:
            futures.append(model.infer_async(sample))  # those before one that fails are waited for
        for future in futures:
            results.append(list(future.get()))
    finally:
        for future in futures[len(results) :]:
            with suppress(Exception):  # the first failure is the one that is told; asking it twice does no harm
                future.get()
    return results


def _random(random: np.random.Generator, port: Port) -> Any:
    kind = str(port.dtype).removeprefix("torch.")
    if kind == "float32":
        return random.standard_normal(port.hwc).astype(np.float32)
    limits = np.iinfo(kind)
    return random.integers(limits.min, limits.max, port.hwc, dtype=kind, endpoint=True)


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(
        a.shape == b.shape and np.array_equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str:
    if [array.shape for array in found] != [array.shape for array in expected]:
        return f"outputs of shapes {[array.shape for array in found]}"
    gaps = [np.abs(a.astype(np.float64) - b.astype(np.float64)) for a, b in zip(found, expected, strict=True)]
    if any(np.isnan(gap).any() for gap in gaps):
        return "NaN"
    return f"differences of up to {max(float(gap.max()) for gap in gaps):g}"
