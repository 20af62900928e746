"""Runs a model on a batch in whatever way it is meant to be run, without logging and without optimizing."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.compile.trees import put_together, take_apart
from lightning_npu.errors import InputError


class Reached(BaseException):  # no Exception, so that the model's own except clauses let it through
    """Ends a run once the submodule was called."""


@contextmanager
def runner(
    model: nn.Module, run: Callable[[nn.Module, Any], Any] | None, device: torch.device, forget: Callable[[], None]
) -> Iterator[Callable[[Any], Any]]:
    """Gives the function that runs the model on a batch; for the length of the block the model cannot log.

    ``forget`` is called before a batch is tried in another way.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if callable(getattr(module, "training_step", None)):  # a LightningModule, of whichever package
                _silence(module, stack)
        if run is not None:
            yield lambda batch: run(model, move(batch, device))
        elif callable(getattr(model, "training_step", None)):
            yield lambda batch: _step(model, _transfer(model, batch, device))
        else:
            yield lambda batch: _call(model, move(batch, device), forget)


def find(model: nn.Module, name: str) -> nn.Module:
    """The submodule of that dotted name.

    Raises:
        InputError: there is none, or it is not built yet.
    """
    known = [known for known, _ in model.named_modules(remove_duplicate=False) if known]
    if name in known:
        return model.get_submodule(name)
    value: Any = model
    for atom in name.split("."):
        if not hasattr(value, atom):
            break
        value = getattr(value, atom)
        if value is None:
            raise InputError(
                f"'{name}' of {type(model).__name__} is not built yet: '{atom}' is None.",
                expected="an nn.Module",
                got="None",
                remedy="offload after it was built, for example at the end of setup() or configure_model()",
            )
    raise InputError(
        f"{type(model).__name__} has no submodule '{name}'.",
        expected=f"the name of a submodule; the nearest are {difflib.get_close_matches(name, known, n=5) or known[:5]}",
        got=repr(name),
        remedy="print([name for name, _ in model.named_modules()]) lists them all",
    )


def candidates(module: nn.Module, item: Any) -> list[tuple[str, Callable[[nn.Module, Any], Any]]]:
    """Ways to call a module with an item that fit its signature, the likeliest first."""
    signature = inspect.signature(module.forward)
    ways: list[tuple[str, Callable[[nn.Module, Any], Any], tuple[Any, ...], Mapping[str, Any]]] = []
    if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
        ways.append(("called with **item", lambda m, x: m(**x), (), item))
    if isinstance(item, tuple | list):
        ways.append(("called with *item", lambda m, x: m(*x), tuple(item), {}))
    ways.append(("called with the item", lambda m, x: m(x), (item,), {}))
    if isinstance(item, tuple | list) and item:  # (images, labels) from a loader, for a module that takes images
        ways.append(("called with item[0]", lambda m, x: m(x[0]), (item[0],), {}))
    return [(name, call) for name, call, args, kwargs in ways if _binds(signature, args, kwargs)]


def move(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    template, leaves, _ = take_apart(batch, is_slot=lambda leaf: isinstance(leaf, Tensor))
    return put_together(template, [leaf.to(device) for leaf in leaves])


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _call(model: nn.Module, batch: Any, forget: Callable[[], None]) -> None:
    ways = candidates(model, batch)
    if not ways:
        wanted = inspect.signature(model.forward)
        raise TypeError(f"{type(model).__name__}.forward{wanted} does not take a {type(batch).__name__} like this")
    errors: list[Exception] = []
    for _, call in ways:
        try:
            if errors:
                forget()
            call(model, batch)
        except Exception as error:  # the next way may fit; the first way's error says most
            errors.append(error)
        else:
            return
    raise errors[0]


def _transfer(model: Any, batch: Any, device: torch.device) -> Any:
    """Moves a batch as a Trainer would, by the hooks of the module; recursively where it has none."""
    if not callable(getattr(model, "transfer_batch_to_device", None)):
        return move(batch, device)
    batch = model.on_before_batch_transfer(batch, 0)
    batch = model.transfer_batch_to_device(batch, device, 0)
    return model.on_after_batch_transfer(batch, 0)


def _step(model: Any, batch: Any) -> None:
    parameters = list(inspect.signature(model.training_step).parameters.values())
    if parameters and parameters[0].name == "dataloader_iter":  # Lightning's flavour for steps that fetch themselves
        model.training_step(iter([(batch, 0, 0)]))
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    model.training_step(*(batch, 0, 0)[: 2 if takes_all else min(len(positional), 3)])


def _silence(module: Any, stack: ExitStack) -> None:
    """Makes logging do nothing, and, under manual optimization, whatever belongs to optimizers."""
    quiet = ["log", "log_dict"]
    if getattr(module, "automatic_optimization", True) is False:
        quiet += ["manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"]
        many = [_Inert() for _ in range(_optimizers(module))]
        optimizers = many[0] if len(many) == 1 else many
        stack.enter_context(_replaced(module, "optimizers", lambda *_, **__: optimizers))
    for name in quiet:
        if callable(getattr(module, name, None)):
            stack.enter_context(_replaced(module, name, lambda *_, **__: None))


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    attributes = vars(module)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)


def _optimizers(module: Any) -> int:
    """How many optimizers a module has, so that steps that unpack them can go on."""
    try:
        configured = module.configure_optimizers()
    except Exception:  # may need a Trainer, or may not be there
        return 1
    if isinstance(configured, tuple | list):
        return len(configured[0]) if configured and isinstance(configured[0], tuple | list) else len(configured)
    return 1


class _Inert:
    """Stands for an optimizer that must not move weights: everything can be called and nothing happens."""

    param_groups: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
