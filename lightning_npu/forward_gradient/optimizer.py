"""``ForwardGradient``: an optimizer that needs forward calls only."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient import evaluation, options
from lightning_npu.forward_gradient.directions import check_distribution
from lightning_npu.forward_gradient.estimators import check_estimator
from lightning_npu.forward_gradient.fixed_point import FixedPoint
from lightning_npu.forward_gradient.float_weights import FloatWeights
from lightning_npu.forward_gradient.hybrid import differentiate, require_disjoint
from lightning_npu.forward_gradient.integer_weights import IntegerWeights, require_trainable
from lightning_npu.forward_gradient.weights import Place, ProbedWeights, Recipe

_SAVED = "forward_gradient"


class ForwardGradient(torch.optim.Optimizer):
    """Trains parameters from losses alone: each step calls the closure ``2 * m`` times and never differentiates.

    Per probe the loss is taken at two places, ``eps`` along a random direction and ``eps`` against it; the difference
    says how far to go along that direction (m-averaged sign-SPSA, Feng et al. 2024, arXiv 2411.04036, and its kin).
    Directions are drawn again from (seed, step, probe) where they are needed, so nothing is stored between or within
    steps, unless an option below says so. For modules upstream of a frozen module that have many parameters,
    ``NPUFrozenModule(gradient="forward")`` needs far fewer calls; see docs/forward_gradient.md.

    Args:
        params: parameters or parameter groups; groups may have their own ``lr`` and ``eps``. None need require
            grad (DDP wants one of its module to). Integer parameters (:class:`GraphWeights`) need ``fixed_point``.
        lr: learning rate. With "sign" and "normalized" a step moves each weight by about ``lr / sqrt(m)``.
        eps: how far probes are from the weights. Behind INT8 activations 1e-2 is better than the usual 1e-3, which
            moves most activations by less than one of their steps.
        m: probes per step.
        estimator: "sign", "projected" or "normalized"; see :func:`.estimators.coefficients`.
        distribution: "gaussian" or "rademacher".
        momentum: the update is a mean over past estimates, in which one that is k steps old counts
            ``momentum ** k``, corrected for the start. One buffer per parameter.
        guide: momentum-guided sampling, ``{"beta": b, "alpha": a}``: directions are
            ``b N(0, a) + (1 - b) N(g, 1 - a)``, scaled to unit variance, where g is the last step's estimate, also
            scaled; ``beta=1`` is plain sampling. Both may be changed between steps:
            ``optimizer.guide = (beta, alpha)``. Gaussian only. One buffer per parameter.
        kernel_norm: scale each tensor's update so that it is, relative to its direction, as long as the tensor.
        sam_rho: sharpness-aware: probes start ``sam_rho`` uphill along one more direction; 2 more calls. 0: off.
        density: share of each matrix's or kernel's weights that is trained: the largest ones, chosen in the first step.
            One boolean per weight. 1.0: all.
        fixed_point: hold weights, directions and updates in integers; float parameters then hold the values of a
            grid, and the model brings the integer activations. Error feedback keeps one byte per weight. float16 and
            bfloat16 parameters hold grids of 8 bits, not of 16.
        first_order: an optimizer over other parameters, such as Adam on a head's: each step makes one more call, with
            gradients, before anything is updated, and steps it. Its state is saved with this one's. Schedulers for it
            are the user's.
        ddp: with several processes: "average": all take the same probes, and the mean loss over their samples counts;
            "directions": each takes probes of its own, and all apply everybody's; float weights are then copied for the
            length of a step. Only losses are exchanged. The processes must start from the same weights, as DDP sees to.
        seed: of directions and dropout; the same on all ranks.

    Attributes:
        probing: whether a probe is being evaluated right now.
        steps: steps taken, skipped ones too.
        skipped: steps without effect because a loss was not finite.
        calls: how often the closure was called.
        calls_in_step: how often in this step, before the call that is running.
        last_loss: what the last step returned; None before the first.

    Raises:
        InputError: an option that is wrong or does not go with another.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        eps: float = 1e-3,
        m: int = 3,
        estimator: str = "sign",
        distribution: str = "gaussian",
        momentum: float = 0.0,
        guide: Mapping[str, float] | None = None,
        kernel_norm: bool = False,
        sam_rho: float = 0.0,
        density: float = 1.0,
        fixed_point: FixedPoint | None = None,
        first_order: torch.optim.Optimizer | None = None,
        ddp: str = "average",
        seed: int = 0,
    ) -> None:
        options.check_numbers(
            lr=lr, eps=eps, m=m, momentum=momentum, sam_rho=sam_rho, density=density, seed=seed, ddp=ddp
        )
        check_estimator(estimator)
        check_distribution(distribution)
        self.m, self.estimator, self.distribution, self.momentum = m, estimator, distribution, float(momentum)
        self.guide = options.guide_options(guide, distribution)
        self.kernel_norm, self.sam_rho, self.density = bool(kernel_norm), float(sam_rho), float(density)
        self.fixed_point, self.first_order, self.ddp, self.seed = fixed_point, first_order, ddp, int(seed)
        self.steps = self.skipped = self.calls = self.calls_in_step = 0
        self.last_loss: Tensor | None = None
        self.probing = self._agreed = self._warned = False
        if fixed_point is not None:
            options.require_integer_options(fixed_point, estimator=estimator, momentum=self.momentum, guide=self.guide)
        super().__init__(params, {"lr": lr, "eps": eps})
        if first_order is not None:
            require_disjoint(first_order, self._parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see :class:`torch.optim.Optimizer`.

        Raises:
            InputError: an option that is wrong or that groups do not have; integer parameters without ``fixed_point``,
                complex ones, or ones too narrow for its grid.
        """
        options.check_group(param_group)
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            require_trainable(parameter, self.fixed_point)

    def step(self, closure: evaluation.Closure | None = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: gives the loss of one batch, one number, the same whenever it is called within the step. It needs
                no ``backward``; with ``first_order`` it may call it.

        Returns:
            The mean loss over all probes (and ranks), a scalar without gradient.

        Raises:
            InputError: no closure, one that gives no number, or BatchNorm in train mode in it. Weights are then what
                they were before the step, except that with ``fixed_point`` float weights are rounded to their grid in
                the first step, even one that fails: keeping the originals would take a copy.
        """
        if not callable(closure):
            raise InputError(
                "ForwardGradient.step needs a closure.",
                expected="a function without arguments that computes the loss and returns it",
                got=repr(closure),
                remedy="optimizer.step(lambda: loss_of(model, batch)); in Lightning, derive from ForwardGradientMixin",
            )
        places = self._places()
        devices = [place.parameter.device for place in places]
        self.calls_in_step = 0
        self.zero_grad(set_to_none=True)
        with torch.no_grad(), evaluation.own_random_numbers(devices) as generators:

            def seeded() -> Any:
                evaluation.seed_probe(generators, self.seed, self.steps)
                result = closure()
                self.calls += 1
                self.calls_in_step += 1
                return result

            weights = self._weights(places)
            losses = self._probe(weights, seeded)
            self._drop_gradients()
            finite = bool(torch.isfinite(losses).all())
            if finite and self.first_order is not None:  # before anything is updated: it may fail
                finite = differentiate(self.first_order, self._parameters(), seeded)
            if finite:
                differences = (losses[:, 0] - losses[:, 1]).tolist()
                for part in weights:
                    part.update(differences, self.estimator)
                if self.first_order is not None:
                    self.first_order.step()
        for place in places:
            if not place.state:
                self.state.pop(place.parameter, None)
        self.skipped += not finite
        self.steps += 1
        self.last_loss = losses.mean().float()
        return self.last_loss

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, buffers if there are any, the counters, and the state of ``first_order``."""
        saved = super().state_dict()
        saved[_SAVED] = {"steps": self.steps, "skipped": self.skipped, "seed": self.seed}
        saved[_SAVED]["fixed_point"] = None if self.fixed_point is None else asdict(self.fixed_point)
        if self.first_order is not None:
            saved["first_order"] = self.first_order.state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as the saved optimizer would have.

        Raises:
            InputError: it is another optimizer's state, or one without or with ``first_order`` unlike this one, or of
                another integer grid.
        """
        counters = state_dict.get(_SAVED)
        if counters is None or ("first_order" in state_dict) != (self.first_order is not None):
            raise InputError(
                "This is not the state of a ForwardGradient like this one.",
                expected=f"entries {_SAVED!r}" + (" and 'first_order'" if self.first_order is not None else " only"),
                got=sorted(state_dict),
                remedy="build the optimizer with the options that it was saved with",
            )
        if "fixed_point" in counters:  # states of before it was kept
            options.require_same_grid(counters["fixed_point"], self.fixed_point)
        super().load_state_dict(state_dict)
        self._narrow_buffers(state_dict)
        self.steps, self.skipped, self.seed = (int(counters[name]) for name in ("steps", "skipped", "seed"))
        self._agreed = False
        if self.first_order is not None:
            self.first_order.load_state_dict(state_dict["first_order"])

    def __getstate__(self) -> dict[str, Any]:
        """Everything that is the optimizer's: torch's own would leave the options behind.

        Hooks, and the ``step`` that a scheduler puts on the instance, are bound to the original; as for torch's own
        optimizers, copies have none.
        """
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _places(self) -> list[Place]:
        counted = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        return [
            Place(parameter, group, index, self.state[parameter]) for index, (group, parameter) in enumerate(counted)
        ]

    def _weights(self, places: list[Place]) -> list[ProbedWeights]:
        recipe = Recipe(self.distribution, self.momentum, self.guide, self.kernel_norm, self.density)
        if self.fixed_point is None:
            exact = self.ddp == "directions" and evaluation.ranks()[1] > 1
            return [FloatWeights(places, recipe, self.seed, self.steps, exact=exact)]
        return [IntegerWeights(places, recipe, self.seed, self.steps, self.fixed_point)]

    def _probe(self, weights: list[ProbedWeights], closure: evaluation.Closure) -> Tensor:
        """Losses at both ends of every probe, [probes, 2], over all ranks; the weights are back where they were."""
        shared = self.ddp == "average"
        rank, world = evaluation.ranks()
        first = 0 if shared else rank * self.m
        self.probing = True
        try:
            if self.sam_rho > 0:
                uphill = self.m if shared else world * self.m  # a direction that no probe takes
                ends = evaluation.average_over_ranks(self._ends(weights, closure, uphill))
                sign = int(torch.sign(ends[0] - ends[1]).nan_to_num())
                for part in weights:
                    part.ascend(uphill, sign, self.sam_rho)
            losses = torch.stack([self._ends(weights, closure, first + probe) for probe in range(self.m)])
        finally:
            self.probing = False
            for part in weights:
                try:
                    part.return_home()
                except KeyboardInterrupt:
                    part.return_home()  # goes on where it was cut off
                    raise
        return evaluation.average_over_ranks(losses) if shared else evaluation.gather_over_ranks(losses)

    def _ends(self, weights: list[ProbedWeights], closure: evaluation.Closure, probe: int) -> Tensor:
        found = []
        for sign in (1, -1):
            for part in weights:
                part.perturb(probe, sign)
            found.append(self._evaluate(closure))
        for part in weights:
            part.restore()
        return torch.stack(found)

    def _evaluate(self, closure: evaluation.Closure) -> Tensor:
        if self.calls_in_step:
            return evaluation.evaluate(closure)
        with evaluation.refuse_batch_statistics():  # watched once a step: hooks are not free
            loss = evaluation.evaluate(closure)
        if not self._agreed:
            evaluation.require_agreement(self.seed, self.steps, loss.device)
            self._agreed = True
        return loss

    def _drop_gradients(self) -> None:
        """A closure that turns gradients on by itself built a graph for nothing."""
        with_gradient = [parameter for parameter in self._parameters() if parameter.grad is not None]
        for parameter in with_gradient:
            parameter.grad = None
        if with_gradient and not self._warned:
            self._warned = True
            warnings.warn(
                "The closure computed gradients while ForwardGradient probed: time and memory for nothing. In "
                "Lightning, derive from ForwardGradientMixin; elsewhere, leave backward() out.",
                stacklevel=4,
            )

    def _narrow_buffers(self, state_dict: dict[str, Any]) -> None:
        """Back to the saved dtypes: torch loads every buffer in its parameter's dtype."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = self.state[parameter][name].to(value.dtype)
