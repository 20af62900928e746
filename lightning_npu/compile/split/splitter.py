"""``split_module``: cuts any traceable module after a named submodule."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_npu.compile.eligible import require_eligible
from lightning_npu.compile.split.build import build
from lightning_npu.compile.split.check import check, larger_batch, valid_sizes
from lightning_npu.compile.split.partition import describe, partition
from lightning_npu.compile.split.parts import Head, Inputs, Tail, arguments
from lightning_npu.compile.split.residual import clean_cuts, residual_join
from lightning_npu.compile.split.trace import FlatRoot, Traced, trace_export, trace_fx
from lightning_npu.compile.split.values import Values, watch
from lightning_npu.compile.trees import Slot, put_together, take_apart
from lightning_npu.compile.undisturbed import undisturbed
from lightning_npu.errors import CompileError, InputError


def split_module(
    module: nn.Module,
    cut: str,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    allow_residual: bool = False,
) -> tuple[Head, Tail]:
    """Cuts a module in two where a submodule has done its work.

    ``tail(*head(x))`` equals ``module(x)``, bit for bit in FP32 eager mode; to 1e-6 where torch's fused inference path
    of ``nn.TransformerEncoderLayer`` would have run and the cut makes it impossible. This is checked before returning.

    The head is called like ``module`` (same parameters, by position or keyword) and returns a tuple of tensors; the
    tail takes these and returns what ``module`` returns, in the same structure.

    * The head holds what the cut's result is made from, and what else ran before and used that work. Branches that
      only look at inputs stay in the tail, in full precision.
    * What the head has finished (keys and values of earlier layers) is among its results, and the tail hands it on.
    * Inputs that the tail needs are the last of the head's results, and the very same tensor objects:
      ``head.passthrough`` maps their positions to input names. They need not go to an accelerator, nor be quantized;
      ``compile_module`` leaves them out of the artifact and hands them on beside it.
    * Buffers, parameters and what is computed from them alone (positional embeddings) stay where they are used. So
      do sizes; the tensor that a size is taken from crosses with it, if no other is known to have the same.
    * Parameters and buffers keep their names. Parameters share their storage with those of ``module`` and are
      frozen or not as those are (torch picks its kernels by that, so it is part of bit-equality), but freezing a half
      does not freeze ``module``; buffers and all other state are copied. ``module`` itself is not changed.
    * A submodule that is called several times is cut after its last call, and a module that is registered under two
      names is one submodule.
    * Head and tail are in eval mode, whatever mode ``module`` is in, and stay there. Hooks of modules that contain
      the cut are traced with the rest.

    ``torch.fx`` traces first, through the modules that contain the cut; all others stay calls. Sizes remain free.
    Where Python code of those few modules looks at sizes, ``torch.export`` takes over; sizes for which the result
    does not hold are then refused when the head is called.

    Args:
        module: the module, any ``nn.Module`` whose inputs and outputs are tensors in tuples, lists, dicts and
            dataclasses, among other values; those others are fixed by the split.
        cut: dotted name of the submodule whose output ends the head, such as "layers.1".
        example_inputs: positional arguments of one call, as a tuple.
        example_kwargs: keyword arguments of that call.
        allow_residual: cut inside a residual branch, too. The shortcut then crosses the cut, in 8 bits if the head is
            compiled so.

    Returns:
        The head and the tail.

    Raises:
        InputError: the example inputs do not fit.
        CompileError: the cut does not exist, is never called or lies inside a residual branch; the module cannot be
            traced; or its halves do not compute what it computes.
    """
    submodule = _find(module, cut)
    require_eligible(module)
    root, leaves = _examples(module, example_inputs, example_kwargs or {})
    with undisturbed(module):
        _require_call(root, submodule, cut, leaves)
    failures: list[str] = []
    for method in ("fx", "export"):
        with undisturbed(module, fused_attention=method == "fx"):
            try:
                return _split(root, submodule, cut, leaves, method, allow_residual)
            except CompileError:
                raise  # about the cut itself: another way of tracing would not mend it
            except Exception as error:  # whatever the module's own code makes of a placeholder
                failures.append(f"torch.{method}: {_brief(error)}")
    raise CompileError(
        f"{type(module).__name__} cannot be cut after '{cut}': neither torch.fx nor torch.export can follow it.",
        expected="Python code that does not look at tensor values, at least in the modules that contain the cut",
        got="; ".join(failures),
        remedy="move what is named above into a submodule without the cut (those are not looked into), or cut nearer "
        "to the root of the module",
    )


def _split(
    root: FlatRoot, submodule: nn.Module, cut: str, leaves: list[torch.Tensor], method: str, allow_residual: bool
) -> tuple[Head, Tail]:
    if method == "export":
        leaves = larger_batch(root, leaves)
        name = next(name for name, m in root.module.named_modules() if m is submodule)
        traced = trace_export(root, name, leaves)
    else:
        traced = trace_fx(root, submodule)
    if not traced.cut_nodes:
        raise CompileError(
            f"'{cut}' computes nothing, it only hands its input through.",
            remedy="cut after the submodule that runs before it",
        )
    values = watch(traced.root, traced.graph, leaves)
    parts = partition(traced, values)
    if not allow_residual:
        _refuse_residual(root.module, traced, values, cut, describe(parts, values))
    inputs = Inputs(root.signature, root.input_template, tuple(root.input_names))
    head, tail = build(root, traced, values, parts, inputs)
    check(root, head, tail, leaves)
    if traced.sizes:
        sizes = valid_sizes(root, head, tail, leaves, traced)
        head, tail = build(root, traced, values, parts, dataclasses.replace(inputs, sizes=sizes))
    return head, tail


def _find(module: nn.Module, cut: str) -> nn.Module:
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    if not cut:
        raise CompileError(
            "The cut names the module itself, so nothing would be left for the tail.",
            expected=f"the name of a submodule of {type(module).__name__}, such as {names[:5]}",
            got=repr(cut),
            remedy="compile the whole module instead of splitting it, or name a submodule",
        )
    if cut not in names:
        near = difflib.get_close_matches(cut, names, n=5, cutoff=0.4) or names[:5]
        raise CompileError(
            f"{type(module).__name__} has no submodule '{cut}'.",
            expected=f"the name of a submodule; the nearest are {near}",
            got=repr(cut),
            remedy="print([name for name, _ in module.named_modules()]) lists them all",
        )
    return module.get_submodule(cut)


def _examples(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[FlatRoot, list[torch.Tensor]]:
    signature = inspect.signature(module.forward)
    if not isinstance(args, tuple | list):
        raise InputError(
            "example_inputs has the wrong type.",
            expected="a tuple of the positional arguments of one call, such as (images,)",
            got=type(args).__name__,
        )
    try:
        named = arguments(signature, tuple(args), dict(kwargs))
    except TypeError as error:
        raise InputError(
            f"The example inputs do not fit the module's forward: {error}.",
            expected=f"{type(module).__name__}.forward{signature}",
            got=f"{len(args)} positional, keywords {sorted(kwargs)}",
            remedy="give the inputs as the module's caller does: example_inputs=(...), example_kwargs={...}",
        ) from error
    template: dict[str, Any] = {}
    leaves: list[torch.Tensor] = []
    names: list[str] = []
    for name, value in named.items():
        part, found, found_names = take_apart(value, name)
        template[name] = _shifted(part, len(leaves))
        leaves += found
        names += found_names
    if not leaves:
        raise InputError("The example inputs hold no tensor.", expected="at least one tensor", got=str(template))
    parameter = next(module.parameters(), None)
    with torch.inference_mode(False):  # inference tensors have no version counters
        leaves = [leaf.detach().clone() for leaf in leaves]
    if parameter is not None:  # recorded inputs are on the CPU wherever the module is
        leaves = [leaf.to(parameter.device) for leaf in leaves]
    return FlatRoot(module, signature, template, names), leaves


def _shifted(template: Any, by: int) -> Any:
    slots = take_apart(template, is_slot=lambda leaf: isinstance(leaf, Slot))
    return put_together(slots[0], [Slot(slot.index + by) for slot in slots[1]])


def _require_call(root: FlatRoot, submodule: nn.Module, cut: str, leaves: list[torch.Tensor]) -> None:
    calls: list[None] = []
    hook = submodule.register_forward_hook(lambda *_: calls.append(None))
    try:
        root.call([leaf.clone() for leaf in leaves])
    except Exception as error:
        raise InputError(
            f"{type(root.module).__name__} does not run on the example inputs: {_brief(error)}",
            got=str([f"{n}: {x.dtype} {list(x.shape)}" for n, x in zip(root.input_names, leaves, strict=True)]),
            remedy="pass inputs as the module gets them in use; capture_inputs records them",
        ) from error
    finally:
        hook.remove()
    if not calls:
        raise CompileError(
            f"'{cut}' exists but is never called when {type(root.module).__name__} runs on the example inputs.",
            expected="a submodule that forward calls as a module (not through .forward, not only for its weights)",
            remedy="cut after one of the submodules that it calls, or after the submodule that it belongs to",
        )


def _refuse_residual(module: nn.Module, traced: Traced, values: Values, cut: str, crossing: list[str]) -> None:
    join = residual_join(traced, values, module, traced.cut_nodes)
    if join is None:
        return
    before, after = clean_cuts(traced, values, module, traced.cut_nodes)
    near = [f"'{name}' ({where})" for name, where in ((before, "before"), (after, "after")) if name]
    raise CompileError(
        f"The cut '{cut}' lies inside a residual branch: a shortcut around it is added back ('{join.name}') in the "
        f"tail, so {len(crossing)} tensors would have to cross: {', '.join(crossing)}.",
        expected=f"a cut between blocks; the nearest are {' and '.join(near)}" if near else "a cut between blocks",
        got=repr(cut),
        remedy="cut there, or pass allow_residual=True to let the shortcut cross as well",
    )


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = next((line.strip() for line in lines if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]
