"""How weights, directions and updates are held in integers: the options of ``ForwardGradient(fixed_point=...)``."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_npu.errors import InputError

ROUNDINGS = ("nearest", "floor", "stochastic", "error_feedback")


@dataclass(frozen=True)
class FixedPoint:
    """Weights, probes and updates on an integer grid, as a fixed-point accelerator holds them.

    A weight is ``scale * w`` with an integer ``w``, a direction ``2**-z_shift * z`` with an integer ``z``. A probe is
    ``(w * 2**z_shift +- eps_q * z) >> z_shift``, rounded and saturated: its factor for ``w`` is exactly one, where the
    published recipe's ``round(1 / scale_z) * scale_z`` shrinks every weight of every probe. An update is one integer
    multiplication, one shift, one rounding, one saturation.

    Args:
        weight_bits: 16 or 8.
        z_bits: of a direction's elements, 2 to 8.
        z_shift: a direction's scale is ``2**-z_shift``; with 8 bits and 5, directions reach to +-3.97.
        headroom: bits above a tensor's largest weight that are kept free for it to grow. Weights that bring their grid
            with them (:class:`GraphWeights`) use neither this nor ``weight_bits``.
        rounding: of the update. "nearest"; "floor", an arithmetic shift as in the publication, which moves every weight
            up by half a step on average; "stochastic", right on average; "error_feedback", which keeps what rounding
            cut off in ``residual_bits`` per weight and adds it to the next update.
        residual_bits: fraction bits of the kept remainder, 1 to 15; one byte per weight up to 8.
        min_eps_steps: the least that ``eps_q`` is, in steps of the grid. With 0, an ``eps`` below half a step perturbs
            nothing: with 8-bit weights that is what the published ``eps=1e-3`` does.

    Raises:
        InputError: a value that is out of its range.
    """

    weight_bits: int = 16
    z_bits: int = 8
    z_shift: int = 5
    headroom: int = 1
    rounding: str = "nearest"
    residual_bits: int = 8
    min_eps_steps: int = 1

    def __post_init__(self) -> None:
        if self.weight_bits not in (8, 16):
            raise InputError("weight_bits is wrong.", expected="16 or 8", got=repr(self.weight_bits))
        if self.rounding not in ROUNDINGS:
            raise InputError("The rounding is wrong.", expected=f"one of {ROUNDINGS}", got=repr(self.rounding))
        for name, least, most in (
            ("z_bits", 2, 8),
            ("z_shift", 0, 6),
            ("headroom", 0, 4),
            ("residual_bits", 1, 15),
            ("min_eps_steps", 0, 127),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(f"{name} is wrong.", expected=f"an integer from {least} to {most}", got=repr(value))
        if 2**self.z_shift > self.z_largest:
            raise InputError(
                f"With z_bits={self.z_bits} and z_shift={self.z_shift} a direction's elements saturate below 1.",
                expected=f"z_shift of {self.z_bits - 2} at most",
                got=self.z_shift,
                remedy="lower z_shift, or raise z_bits",
            )

    @property
    def largest(self) -> int:
        """The largest integer weight; the smallest is its negative."""
        return int(2 ** (self.weight_bits - 1) - 1)

    @property
    def z_largest(self) -> int:
        """The largest integer element of a direction; the smallest is its negative."""
        return int(2 ** (self.z_bits - 1) - 1)
