"""Vector-Jacobian products of a frozen module, estimated from forward calls, as autograd asks for them."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_npu.errors import DeviceError, InputError
from lightning_npu.forward_gradient import probes, step_size
from lightning_npu.forward_gradient.agreement import Agreement
from lightning_npu.forward_gradient.bridge import Bridge
from lightning_npu.forward_gradient.directions import direction
from lightning_npu.forward_gradient.probes import Group, Question
from lightning_npu.forward_gradient.step_size import StepSize

if TYPE_CHECKING:
    from lightning_npu.device_calls import DeviceModule

HOPELESS = 0.02  # cosine of an estimate to the gradient below which no training was seen to follow it


class VectorJacobian:
    """What one module needs for its gradients: options, a counter of backward passes, step sizes, figures.

    Args:
        options: the user's.
    """

    def __init__(self, options: Bridge) -> None:
        self.options = options
        self.step = 0
        self.calls = 0
        self.samples = 0
        self.agreement = Agreement()
        self._steps: dict[str, StepSize] = {}
        self._known: Mapping[str, StepSize] | None = None
        self._warned: set[str] = set()

    def encode(self, module: DeviceModule, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Encode one batch so that autograd can go back through it; flat inputs, flat outputs.

        Raises:
            InputError: options that name other inputs, or a structure that does not fit one.
            DeviceError: the device failed.
        """
        self.check(module, tensors)
        return list(_Differentiable.apply(self, module, dtype, *tensors))  # type: ignore[no-untyped-call]

    def check(self, module: DeviceModule, tensors: Sequence[Tensor]) -> None:
        """Compare the options with the module's inputs.

        Raises:
            InputError: options that name other inputs, or a structure that does not fit one that requires grad.
        """
        names = [spec.name for spec in module._inputs]
        for option in (self.options.eps, self.options.structure):
            unknown = sorted(set(option) - set(names)) if isinstance(option, Mapping) else []
            if unknown:
                raise InputError("Bridge names inputs that the module does not have.", expected=names, got=unknown)
        for spec, tensor in zip(module._inputs, tensors, strict=True):
            structure = self.options.structure_of(spec.name)
            if structure is not None and tensor.requires_grad:
                structure.check(spec)

    def estimate(
        self,
        module: DeviceModule,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """One estimate of the loss's gradient per flat input, of its dtype and on its device; None where not wanted.

        Args:
            module: the frozen module.
            tensors: its flat inputs.
            gradients: the loss's gradient per flat output; None where the output was not used.
            wanted: per input, whether its gradient is.

        Raises:
            DeviceError: the device failed, and no reference takes over.
        """
        step, self.step = self.step, self.step + 1
        host = module._exchange.to_host(tensors, module._inputs)
        given = [
            gradient.detach().to("cpu", torch.float32)
            if gradient is not None and spec.torch_dtype.is_floating_point
            else None
            for gradient, spec in zip(gradients, module._outputs, strict=True)
        ]
        moved = [index for index, want in enumerate(wanted) if want]
        # one input after the other: moved together, the one that matters more drowns the others
        questions = [Question(host, module._inputs, given, module._outputs, [index]) for index in moved]
        empty = any(question.batch == 0 for question in questions)
        if empty or not any(gradient is not None for gradient in given):
            return [torch.zeros_like(x) if want else None for x, want in zip(tensors, wanted, strict=True)]
        for index, question in zip(moved, questions, strict=True):
            self._warn_of_noise(module._inputs[index].name, host[index].numel() // max(1, question.batch or 1))
        sizes = {index: self._step_size(module, index, host[index]).value for index in moved}
        sums = self._sums(module, questions, step, sizes)
        results: list[Tensor | None] = []
        for index, tensor in enumerate(tensors):
            if index not in sums:
                results.append(None)
                continue
            spec = module._inputs[index]
            structure = self.options.structure_of(spec.name)
            share = 1.0 if structure is None else structure.share(host[index].shape)
            mean = (sums[index][0] + sums[index][1]) * (share / (self.options.m * sizes[index]))
            results.append(mean.to(tensor.device, tensor.dtype))
        return results

    def _warn_of_noise(self, name: str, values: int) -> None:
        """Say once where plain directions tell next to nothing: training would follow noise, and may do harm."""
        cosine = math.sqrt(self.options.m / max(1, values))
        if cosine >= HOPELESS or name in self._warned or self.options.structure_of(name) is not None:
            return
        self._warned.add(name)
        warnings.warn(
            f"The gradient of input '{name}' is estimated from {self.options.m} plain directions of {values} values "
            f"per sample: its cosine to the true one is about {cosine:.3f}, which is noise. Take "
            "gradient=Bridge(m=2, structure=Colour()) or another structure that acts as what is trained does; see "
            "docs/forward_gradient.md.",
            stacklevel=2,
        )

    def _sums(
        self, module: DeviceModule, questions: Sequence[Question], step: int, sizes: Mapping[int, float]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Per input, the sums over the first and the second half of the probes, times the step size."""
        half = self.options.m // 2
        sums = {
            index: (torch.zeros_like(question.inputs[index]), torch.zeros_like(question.inputs[index]))
            for question in questions
            for index in question.moved
        }

        def take(question: Question, group: Group, answers: Sequence[Sequence[Tensor]]) -> None:
            seen = probes.slopes(question, group, answers)
            for place, probe in enumerate(group.probes):
                for index in question.moved:
                    sums[index][probe >= half].add_(probes.along(question, group, seen, index, place))

        try:
            if module.failure is None:
                self._ask_device(module, questions, step, sizes, take)
            else:
                self._ask_reference(module, questions, step, sizes, take)
        except DeviceError as error:
            if module.failure is not None or not module._fails_over(error):
                raise
            for pair in sums.values():  # a difference between device and reference would tell their distance
                for each in pair:
                    each.zero_()
            self._ask_reference(module, questions, step, sizes, take)
        if half:
            self.agreement.add([(a / sizes[index], b / sizes[index]) for index, (a, b) in sums.items()])
        return sums

    def _ask_device(
        self,
        module: DeviceModule,
        questions: Sequence[Question],
        step: int,
        sizes: Mapping[int, float],
        take: Callable[[Question, Group, Sequence[Sequence[Tensor]]], None],
    ) -> None:
        """Keep the device's slots busy, with no more of the probes in memory than that takes."""
        waiting: deque[tuple[Question, Group, list[Any]]] = deque()

        def settle() -> None:
            question, group, pending = waiting.popleft()
            take(question, group, [module._wait(each) for each in pending])

        try:
            for question, group in self._groups(questions, step, sizes):
                name = f"backward pass {step}, probe{'s' * (len(group.probes) > 1)} {_span(group.probes)}"
                waiting.append((question, group, [module._submit(call, name) for call in group.calls]))
                self._count(group, question)
                while len(waiting) > module.slots:
                    settle()
            while waiting:
                settle()
        finally:
            for _, _, pending in waiting:
                for each in pending:
                    each.cancel()

    def _ask_reference(
        self,
        module: DeviceModule,
        questions: Sequence[Question],
        step: int,
        sizes: Mapping[int, float],
        take: Callable[[Question, Group, Sequence[Sequence[Tensor]]], None],
    ) -> None:
        place = torch.device("cpu")
        for question, group in self._groups(questions, step, sizes):
            self._count(group, question)
            take(question, group, [module._reference_outputs(call, place, torch.float32) for call in group.calls])

    def _groups(
        self, questions: Sequence[Question], step: int, sizes: Mapping[int, float]
    ) -> Iterator[tuple[Question, Group]]:
        options = self.options
        for question in questions:
            draw = self._directions(question, step)
            for group in probes.groups(question, options.m, options.max_batch, draw, sizes):
                yield question, group

    def _directions(self, question: Question, step: int) -> Callable[[int, int], Tensor]:
        options, seed = self.options, self.options.seed + _rank()

        def draw(probe: int, index: int) -> Tensor:
            tensor = question.inputs[index]

            def numbers(shape: Sequence[int]) -> Tensor:
                return direction(
                    shape, seed=seed, step=step, probe=probe, index=index, distribution=options.distribution
                )

            structure = options.structure_of(question.input_specs[index].name)
            return numbers(tensor.shape) if structure is None else structure.direction(tensor.float(), numbers)

        return draw

    def _count(self, group: Group, question: Question) -> None:
        self.calls += len(group.calls)
        self.samples += 2 * len(group.probes) * question.batch

    # ---- step sizes

    def _step_size(self, module: DeviceModule, index: int, values: Tensor) -> StepSize:
        name = module._inputs[index].name
        option = self.options.eps_of(name)
        if not isinstance(option, str):
            self._steps[name] = StepSize(float(option), "given")
        elif name not in self._steps:
            if self._known is None:
                self._known = step_size.of_artifact(module.artifact)
            self._steps[name] = self._known.get(name) or step_size.of_spread(values)
        return self._steps[name]

    # ---- what is kept and told

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the counter, and the steps that the first batch decided."""
        return {"step": self.step, "eps": {name: [size.value, size.source] for name, size in self._steps.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.step = int(state["step"])
        self._steps = {name: StepSize(float(value), str(source)) for name, (value, source) in state["eps"].items()}

    @property
    def stats(self) -> dict[str, Any]:
        """Figures by name.

        ``backwards`` (backward passes, over checkpoints too), ``calls`` and ``samples`` that they took in this process,
        ``eps`` (value and source per input), ``agreement`` (cosine of the estimates from two halves of the
        directions, over about the last 100 passes; None with m=1) and ``cosine`` (what it implies for the cosine of the
        whole estimate to the gradient).
        """
        return {
            "backwards": self.step,
            "calls": self.calls,
            "samples": self.samples,
            "eps": {name: {"value": size.value, "source": size.source} for name, size in self._steps.items()},
            "agreement": self.agreement.value,
            "cosine": self.agreement.cosine,
        }


class _Differentiable(torch.autograd.Function):
    """The device in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, vjp: VectorJacobian, module: DeviceModule, dtype: torch.dtype, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.vjp, ctx.module = vjp, module
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outputs = module.encode(tensors, dtype, ahead=False)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        estimates = ctx.vjp.estimate(ctx.module, ctx.saved_tensors, gradients, ctx.needs_input_grad[3:])
        return (None, None, None, *estimates)


def refuse_second_derivatives() -> None:
    """To be called in a backward pass: autograd records it where somebody wants to differentiate once more.

    Raises:
        InputError: it does.
    """
    if torch.is_grad_enabled():
        raise InputError(
            "A gradient through an NPUFrozenModule has no gradient itself: second derivatives cannot be had.",
            expected="backward() or autograd.grad() without create_graph=True",
            remedy="take the penalty or the inner step behind the module, on features that are detached",
        )


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
