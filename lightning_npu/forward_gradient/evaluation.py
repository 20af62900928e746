"""What surrounds a probe: the same random numbers in each, no gradients, no running statistics, losses over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.directions import key

Closure = Callable[[], Any]
_STREAM = -2  # no probe has this number


def ranks() -> tuple[int, int]:
    """This process's rank and the number of processes that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


@contextmanager
def own_random_numbers(devices: Iterable[torch.device]) -> Iterator[list[torch.Generator]]:
    """Whatever the block draws from torch's generators, they go on afterwards as if it had not.

    Gives those generators: the processor's, and those of the CUDA devices among ``devices``.
    """
    indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=indices):
        yield [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]


def seed_probe(generators: Iterable[torch.Generator], seed: int, step: int) -> None:
    """Start torch's generators for one probe: dropout masks are equal within a step and a function of its number.

    Ranks see different samples, so each has a stream of its own.
    """
    start = key(seed, step, _STREAM, ranks()[0]) % 2**63
    for generator in generators:  # torch.manual_seed would take 0.2 ms, to note who called it
        generator.manual_seed(start)


def evaluate(closure: Closure) -> Tensor:
    """Call ``closure`` without gradients; gives its loss, a detached scalar in float64 where the device has it.

    Raises:
        InputError: the closure gives no scalar, or calls ``backward``.
    """
    try:
        with torch.no_grad():
            loss = closure()
    except RuntimeError as error:
        if "does not require grad" in str(error):
            raise InputError(
                "The closure calls backward() while the optimizer probes.",
                expected="a closure that computes the loss and returns it",
                remedy="remove backward() and zero_grad() from it: forward gradients need forward calls only",
            ) from error
        raise
    return number_of(loss)


def number_of(loss: object) -> Tensor:
    """What a closure returned as a detached scalar, in float64 where the device has it.

    Raises:
        InputError: it is no single number.
    """
    value = torch.as_tensor(loss).detach() if isinstance(loss, (Tensor, float, int)) else None
    if value is None or value.numel() != 1:
        raise InputError(
            "The closure must return the loss, one number.",
            expected="a tensor with one element, or a float",
            got=f"a tensor of shape {list(value.shape)}" if value is not None else repr(type(loss).__name__),
            remedy="return the loss of the batch; in Lightning, training_step must return it for every batch",
        )
    wide = torch.float32 if value.device.type == "mps" else torch.float64
    return value.reshape(()).to(wide)


@contextmanager
def refuse_batch_statistics() -> Iterator[None]:
    """Raise where a module of the block updates running statistics: every probe would move them once more."""

    def look(module: nn.Module, args: Any) -> None:
        norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
        if isinstance(module, norms) and module.training and module.track_running_stats:
            raise InputError(
                f"A {type(module).__name__} in train mode runs inside the closure.",
                expected="running statistics that probes do not change",
                got="each of a step's probes would update them, with perturbed weights",
                remedy="put such layers in eval mode after model.train(): for m in model.modules(): "
                "if isinstance(m, torch.nn.modules.batchnorm._BatchNorm): m.eval()",
            )

    handle = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def average_over_ranks(losses: Tensor) -> Tensor:
    """The mean over ranks of each entry, equal on all ranks bit for bit."""
    world = ranks()[1]
    if world > 1:
        torch.distributed.all_reduce(losses)
        losses = losses / world
    return losses


def gather_over_ranks(losses: Tensor) -> Tensor:
    """The entries of all ranks, one rank's after another's."""
    world = ranks()[1]
    if world == 1:
        return losses
    parts = [torch.empty_like(losses) for _ in range(world)]
    torch.distributed.all_gather(parts, losses)
    return torch.cat(parts)


def require_agreement(seed: int, step: int, device: torch.device) -> None:
    """Make sure that all ranks draw the same directions.

    Raises:
        InputError: on every rank, if seeds or steps differ.
    """
    if ranks()[1] == 1:
        return
    own = torch.tensor([seed, -seed, step, -step], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX)
    most_seed, least_seed, most_step, least_step = own.tolist()
    if (most_seed, most_step) != (-least_seed, -least_step):
        raise InputError(
            "The ranks would draw different directions.",
            expected="one seed and one step on all ranks",
            got=f"seeds {-least_seed} to {most_seed}, steps {-least_step} to {most_step}",
            remedy="pass the same seed to ForwardGradient on every rank, and load the same checkpoint",
        )
