"""``Prefetch``: the accelerator encodes ahead while the training step runs, in any Lightning training."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_npu._lightning import pl
from lightning_npu.balance import Balancer
from lightning_npu.errors import InputError
from lightning_npu.lookahead import Ahead, Depth, Inputs, Statistics, Tag, View, leaves, replace_leaves, view_of
from lightning_npu.module import NPUFrozenModule
from lightning_npu.runtimes.cpu import available_cores

SWITCH_S = 0.0005


class Prefetch(pl.Callback):
    """Asks for the features of the next batches while the current one trains.

    Finds every :class:`NPUFrozenModule` of the model, sees in the first step which tensors of the batch feed it, and
    from then on submits those of the next batches to the accelerator. The training step does not change, and neither
    does what is trained: the order of batches, random numbers and every other callback see what they would see
    without. A requested result is used only for the very tensor it was computed from, unedited, or for its image on
    the training device; everything else is computed on the spot.

    Where torch trains on the CPU and the artifact runs there too, the cores are split: the artifact keeps its threads
    (half of the cores by default), torch gets the rest while the callback is installed. Python's threads also take
    turns more often meanwhile (``sys.setswitchinterval``, half a millisecond): else the device would stand idle for up
    to 5 ms per batch until a training step that computes in Python lets the worker give it the next one.

    Args:
        depth: how many batches to ask for ahead; "auto" starts at 2 and grows up to 8 where the times vary, within
            ``memory_bytes``; 0 turns it off.
        inputs: for modules that are fed what the step computes from the batch, such as normalised images: a function
            from the batch, as the loader gives it, to the module's input (a tensor, a tuple of arguments, a dict of
            keyword arguments), or a mapping from module names to such functions. Called in a thread of the worker. A
            method ``npu_inputs(batch)`` of the LightningModule does the same. What it gives is used only where it
            equals what the step passes, bit for bit.
        drop_inputs: leave tensors that feed frozen modules on the host, where the step uses them for nothing else.
        memory_bytes: what the batches ahead may hold in all under "auto"; default 1 GiB.
        balance: "off"; "auto": where the accelerator is too slow, as many batches are encoded by the FP32 head in
            torch as are needed to keep a step from becoming longer than without the accelerator; or the share of the
            batches that the accelerator encodes. Mixes INT8 and FP32 features. Needs ``offload(keep_reference=True)``.
        seed: which batches a share picks.

    Raises:
        InputError: a value of the wrong kind.
    """

    def __init__(
        self,
        depth: int | str = "auto",
        inputs: Inputs | None = None,
        drop_inputs: bool = False,
        memory_bytes: int = 1 << 30,
        balance: float | str = "off",
        seed: int = 0,
    ) -> None:
        self._options = (depth, memory_bytes)
        Depth(depth, memory_bytes=memory_bytes)  # refuse a wrong value where it was written
        self._seed = seed
        self.balancer = Balancer(balance, seed=seed)
        self.inputs, self.drop_inputs = inputs, drop_inputs
        self.statistics = Statistics()
        self._ahead: Ahead | None = None
        self._views: list[View] = []
        self._patched: list[tuple[Any, str, Any]] = []
        self._trainer: Any = None
        self._torch_threads: int | None = None
        self._switch_s: float | None = None

    @property
    def depth(self) -> int:
        """How many batches are asked for ahead at present."""
        ahead = self._ahead
        return Depth(self._options[0]).value if ahead is None else ahead.depth.value

    def calibrate(self, steps: int) -> None:
        """Encode some of the next batches on the spot, to time training and device each by itself."""
        if self._ahead is not None:
            self._ahead.calibrate(steps)

    @property
    def calibrating(self) -> bool:
        """Whether the present step and the device have each other's time for themselves."""
        return self._ahead is not None and self._ahead.calibrating

    @property
    def modules(self) -> dict[str, NPUFrozenModule]:
        """The frozen modules that are looked ahead for, by name."""
        return {} if self._ahead is None else dict(self._ahead.modules)

    # ---- in and out

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the look-ahead into the trainer's strategy and precision plugin."""
        self._remove()
        self._trainer = trainer
        if not self._install(trainer, pl_module):  # LightningModule.setup and configure_model may offload yet
            self._patch(trainer.strategy, "setup", functools.partial(self._set_up_late, pl_module))

    def _set_up_late(self, pl_module: Any, original: Callable[[Any], Any], trainer: Any) -> Any:
        if not self._install(trainer, pl_module) and self in trainer.callbacks:
            pl.utilities.rank_zero_warn(
                f"Prefetch does nothing: {type(pl_module).__name__} has no NPUFrozenModule. Offload a part of it "
                "first: lightning_npu.offload(model, ...)."
            )
        return original(trainer)

    def _install(self, trainer: Any, pl_module: Any) -> bool:
        """Look ahead for the frozen modules; whether there are any."""
        modules = {name: m for name, m in pl_module.named_modules() if isinstance(m, NPUFrozenModule)}
        refuse_finetuning(trainer, pl_module, modules)
        if not modules or self._options[0] == 0:
            return bool(modules)
        inputs = self.inputs if self.inputs is not None else getattr(pl_module, "npu_inputs", None)
        if inputs is None and _overrides(trainer, pl_module, "on_after_batch_transfer"):
            pl.utilities.rank_zero_warn(
                "Prefetch is off: on_after_batch_transfer is overridden, so what reaches the NPUFrozenModule may not "
                "be what the loader gave. Move the transform into the dataset, or describe it by Prefetch(inputs=...)."
            )
            return True
        self.balancer = Balancer(self.balancer.balance, seed=self._seed)
        depth = Depth(self._options[0], memory_bytes=self._options[1])
        self._ahead = Ahead(modules, depth, inputs, self.balancer)
        self.statistics = self._ahead.statistics
        if trainer.strategy.root_device.type == "cpu":
            self._split_cores(modules)
        if (switch_s := sys.getswitchinterval()) > SWITCH_S:
            self._switch_s = switch_s
            sys.setswitchinterval(SWITCH_S)
        self._patch(trainer.strategy, "process_dataloader", self._look_ahead)
        self._patch(trainer.precision_plugin, "convert_input", self._convert)
        self._patch(trainer.strategy, "batch_to_device", self._move)
        return True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave everything as it was."""
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave everything as it was: Lightning calls no teardown after errors and Ctrl-C."""
        self._remove()

    def _split_cores(self, modules: dict[str, NPUFrozenModule]) -> None:
        """Leave the cores on which artifacts run alone: two pools on the same cores slow each other."""
        busy = max((module.host_threads for module in modules.values()), default=0)
        threads = max(1, available_cores() - busy)
        if busy and threads < torch.get_num_threads():
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(threads)

    def _patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        wrapper = functools.partial(around, getattr(owner, name))
        setattr(owner, name, wrapper)
        self._patched.append((owner, name, wrapper))

    def _remove(self) -> None:
        while self._patched:
            owner, name, wrapper = self._patched.pop()
            if vars(owner).get(name) is wrapper:  # somebody may have patched on top
                del owner.__dict__[name]
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
            self._torch_threads = None
        if self._switch_s is not None:
            sys.setswitchinterval(self._switch_s)
            self._switch_s = None
        for view in self._views:
            view.retire()
        _unwrap(self._trainer, self._views)
        self._views = []
        if self._ahead is not None:
            self._ahead.detach()
        self._ahead = self._trainer = None

    # ---- the three places

    def _look_ahead(self, original: Callable[[Any], Any], loader: Any) -> Any:
        assert self._ahead is not None
        view = view_of(loader, self._ahead, reach=self._reach)
        self._views.append(view)
        return original(view)  # innermost, so that strategies that move batches themselves still can

    def _convert(self, original: Callable[[Any], Any], batch: Any) -> Any:
        assert self._ahead is not None
        tags = [self._ahead.host.pop(tensor) for tensor in leaves(batch)]
        with torch.inference_mode(False), torch.no_grad():
            converted = original(batch)
        self._follow(tags, converted, device=False)
        return converted

    def _move(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._ahead is not None
        ahead = self._ahead
        ahead.device.clear()
        ahead.kept.clear()
        found = leaves(batch)
        tags = [ahead.host.pop(tensor) for tensor in found]
        kept = self._kept(tags, found) if self.drop_inputs else {}
        with torch.inference_mode(False), torch.no_grad():
            moved = original(replace_leaves(batch, {i: t.new_empty(0) for i, t in kept.items()}), *args, **kwargs)
        if kept:
            moved = replace_leaves(moved, kept)
            ahead.kept.update(id(tensor) for tensor in kept.values())
        self._follow(tags, moved, device=True)
        return moved

    def _kept(self, tags: list[Tag | None], found: list[Tensor]) -> dict[int, Tensor]:
        """The leaves that feed a frozen module, by index."""
        feeding = {
            leaf
            for tag in tags
            if tag is not None
            for r in tag.batch.view.routes.values()
            for route in r
            for leaf in route
        }
        return {i: t for i, (tag, t) in enumerate(zip(tags, found, strict=True)) if tag and tag.leaf in feeding}

    def _follow(self, tags: list[Tag | None], batch: Any, *, device: bool) -> None:
        assert self._ahead is not None
        arrived = leaves(batch)
        if len(arrived) == len(tags):
            self._ahead.moved(tags, arrived, self._ahead.device if device else self._ahead.host)

    # ---- how far

    def _reach(self, view: View) -> int:
        """Batches worth fetching beyond the one that is about to be delivered: none that no step will use."""
        trainer = self._trainer
        if trainer is None or trainer.sanity_checking:
            return 0
        if not trainer.training:
            return 1 << 30
        loop, window = trainer.fit_loop, trainer.accumulate_grad_batches
        done = loop.batch_idx + 1
        left = trainer.num_training_batches - done
        if trainer.max_steps is not None and trainer.max_steps >= 0:
            left = min(left, (trainer.max_steps - trainer.global_step) * window - done % window)
        return int(max(0, min(left - 1, 1 << 30)))


def refuse_finetuning(trainer: Any, pl_module: Any, modules: dict[str, NPUFrozenModule]) -> None:
    """Refuse BackboneFinetuning and its kin where they aim at an offloaded module.

    There is nothing to unfreeze, no parameter group is added, and in the following epochs such a callback rewrites
    the learning rate of the last group that is there: the head's.

    Raises:
        InputError: one of the trainer's callbacks does that.
    """
    from_name = {"BackboneFinetuning": "backbone"}
    for callback in trainer.callbacks:
        attribute = from_name.get(type(callback).__name__)
        kin = next((from_name[c.__name__] for c in type(callback).__mro__ if c.__name__ in from_name), attribute)
        if kin is None:
            continue
        target = getattr(pl_module, kin, None)
        if isinstance(target, torch.nn.Module) and any(m in modules.values() for m in target.modules()):
            raise InputError(
                f"{type(callback).__name__} would unfreeze '{kin}', which is offloaded: it has no parameters to "
                "unfreeze, and the callback would silently change the learning rate of the head instead.",
                expected="an offloaded module that stays frozen",
                got=f"{type(callback).__name__} in the trainer's callbacks",
                remedy="remove the callback, or do not offload this module",
            )


def _overrides(trainer: Any, pl_module: Any, hook: str) -> bool:
    owners = [(pl_module, pl.LightningModule), (getattr(trainer, "datamodule", None), pl.LightningDataModule)]
    return any(
        isinstance(owner, kind) and getattr(type(owner), hook, None) is not getattr(kind, hook, None)
        for owner, kind in owners
    )


def _unwrap(trainer: Any, views: list[View]) -> None:
    """Put the loaders back where Lightning stored views of them: a user may hold the container and use it again."""
    if trainer is None or not views:
        return
    loops = [getattr(trainer, name, None) for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop")]
    loops.append(getattr(getattr(loops[0], "epoch_loop", None), "val_loop", None))
    for loop in loops:
        combined = getattr(loop, "_combined_loader", None)
        if combined is not None and any(isinstance(loader, View) for loader in combined.flattened):
            combined.flattened = [
                loader.loader if isinstance(loader, View) else loader for loader in combined.flattened
            ]
