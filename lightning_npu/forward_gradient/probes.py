"""Pairs of calls on either side of a batch, stacked along the batch axis, and the slopes that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_npu.tensor_spec import TensorSpec, common_batch

Displacement = Mapping[int, Tensor]  # by the index of the input that is moved


@dataclass(frozen=True)
class Question:
    """Which vector-Jacobian product is asked for.

    Attributes:
        inputs: flat inputs on the host, as the runtime takes them.
        input_specs: what they are.
        gradients: per output, the gradient of the loss, float32, on the host; None where there is none.
        output_specs: what the outputs are.
        moved: indices of the inputs whose gradient is wanted.
    """

    inputs: Sequence[Tensor]
    input_specs: Sequence[TensorSpec]
    gradients: Sequence[Tensor | None]
    output_specs: Sequence[TensorSpec]
    moved: Sequence[int]

    @property
    def batch(self) -> int:
        """Samples; 1 where nothing has a batch axis."""
        count = common_batch(self.input_specs, self.inputs)
        return 1 if count is None else count

    @property
    def stackable(self) -> bool:
        """Whether every tensor that matters has a batch axis, so that several probes fit in one call."""
        axes = [self.input_specs[index].batch_axis for index in self.moved]
        axes += [
            spec.batch_axis
            for spec, gradient in zip(self.output_specs, self.gradients, strict=True)
            if gradient is not None
        ]
        return None not in axes


@dataclass(frozen=True)
class Group:
    """Probes that are evaluated together.

    Attributes:
        probes: their numbers.
        directions: per probe, the direction of each moved input.
        calls: the inputs of each device call: one for all of them on both sides, or one for each side.
    """

    probes: Sequence[int]
    directions: Sequence[Displacement]
    calls: Sequence[list[Tensor]]


@dataclass(frozen=True)
class Slopes:
    """How the loss changes along each probe's direction, times the step.

    Attributes:
        own: (probes, batch): what each sample's own outputs tell.
        shared: (probes,): what outputs without a batch axis tell, about all samples together.
    """

    own: Tensor
    shared: Tensor


def groups(
    question: Question,
    count: int,
    max_batch: int | None,
    direction: Callable[[int, int], Tensor],
    step: Mapping[int, float],
) -> Iterator[Group]:
    """Divide ``count`` probes into groups, each evaluated at x + step u and x - step u.

    Args:
        question: what is asked for.
        count: probes.
        max_batch: the most samples of one call, but never less than the batch itself; None: no limit.
        direction: gives u, by probe and input.
        step: by input.
    """
    limit = count if max_batch is None else max_batch // max(question.batch, 1) // 2
    together = question.stackable and limit >= 1
    size = max(1, limit) if together else 1
    for first in range(0, count, size):
        probes = range(first, min(first + size, count))
        directions = [{index: direction(probe, index) for index in question.moved} for probe in probes]
        sides = [
            [{index: sign * step[index] * u for index, u in directed.items()} for directed in directions]
            for sign in (1.0, -1.0)
        ]
        calls = [[*sides[0], *sides[1]]] if together else sides
        yield Group(probes, directions, [_stack(question, moves) for moves in calls])


def slopes(question: Question, group: Group, answers: Sequence[Sequence[Tensor]]) -> Slopes:
    """Half the difference between the two sides, along the gradients of the outputs."""
    count, batch = len(group.probes), question.batch
    own, shared = torch.zeros(count, batch), torch.zeros(count)
    for index, (spec, gradient) in enumerate(zip(question.output_specs, question.gradients, strict=True)):
        if gradient is None:
            continue
        axis = spec.batch_axis
        if axis is None:
            (plus,), (minus,) = ([answer[index]] for answer in answers)
            shared += 0.5 * ((plus.float() - minus.float()) * gradient).sum()
            continue
        rows = [answer[index].movedim(axis, 0).float() for answer in answers]
        plus, minus = rows if len(rows) == 2 else rows[0].chunk(2)
        change = (plus - minus).reshape(count, batch, -1)
        own += 0.5 * torch.einsum("pbn,bn->pb", change, gradient.movedim(axis, 0).reshape(batch, -1))
    return Slopes(own, shared)


def along(question: Question, group: Group, seen: Slopes, index: int, probe: int) -> Tensor:
    """One probe's estimate for one input, times the step: each sample's slope along its own direction.

    For an input that all samples share, their slopes add up.
    """
    u, axis = group.directions[probe][index], question.input_specs[index].batch_axis
    if axis is None:
        return u * (seen.own[probe].sum() + seen.shared[probe])
    slope = seen.own[probe] + seen.shared[probe]
    return u * slope.view([-1 if place == axis else 1 for place in range(u.ndim)])


def _stack(question: Question, moves: Sequence[Displacement]) -> list[Tensor]:
    stacked = []
    for index, (spec, tensor) in enumerate(zip(question.input_specs, question.inputs, strict=True)):
        copies = [tensor + move[index].to(tensor.dtype) if index in move else tensor for move in moves]
        if spec.batch_axis is None or len(copies) == 1:
            stacked.append(copies[0].contiguous())  # what is not moved and has no batch axis is the same for all
        else:
            stacked.append(torch.cat(copies, spec.batch_axis))
    return stacked
