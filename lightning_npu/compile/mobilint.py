"""Target "mobilint": the head as a compile kit, and as an artifact where the vendor's compiler is installed."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.artifact import Artifact, new_folder
from lightning_npu.compile.build import Prepared
from lightning_npu.compile.mobilint_compiler import installed_compiler, run_script
from lightning_npu.compile.mobilint_export import export_for_mobilint
from lightning_npu.compile.mobilint_finish import finish
from lightning_npu.compile.mobilint_kit import ARTIFACT, KIT, MODEL, MXQ, read_kit, write_kit
from lightning_npu.compile.mobilint_options import MobilintOptions, bits_for
from lightning_npu.errors import ArtifactError, CompileError, CompilerMissingError, InputError
from lightning_npu.hashing import state_sha256


def kit_path(output: Path) -> Path:
    """Where the kit of an artifact is written: "encoder.npu" has "encoder.kit"."""
    return output.with_name(f"{output.name.removesuffix('.npu')}.kit")


def compile_for_mobilint(
    module: nn.Module,
    prepare: Callable[[nn.Module], Prepared],
    build: Callable[[Prepared, Path], None],
    output: Path,
    options: MobilintOptions,
    *,
    precision: str,
    overwrite: bool,
) -> Artifact:
    """Write the kit; compile it and make the artifact where the vendor's compiler is installed.

    Args:
        module: the head.
        prepare: reads the data of a module and finds what goes in and comes out.
        build: writes an artifact for target "onnx" into a folder.
        output: path of the artifact.
        options: what was chosen.
        precision: "a8w8" or "a16w8".
        overwrite: replace what is at ``output`` and the kit beside it.

    Raises:
        CompilerMissingError: there is no compiler here; names the kit and the next commands.
        CompileError: the head is not one that the compiler is known to take, or the compiler failed.
        ArtifactError: ``output`` or the kit exists.
    """
    bits_for(precision, attentions=1)  # refuse a wrong precision before any work
    kit = kit_path(output)
    if not overwrite:
        if os.path.lexists(output):
            raise ArtifactError(
                f"{output} exists already.",
                expected="a new path",
                remedy="choose another output, delete it, or pass overwrite=True",
            )
        if (kit / KIT).is_file():
            raise _waiting(kit, output, module)
    taken = module if options.normalize is None else _Normalized(module, options.normalize)
    with new_folder(kit, overwrite=overwrite, marker=KIT) as folder:
        made = prepare(taken)
        if options.normalize is not None and all(spec.dtype != "uint8" for spec in made.inputs):
            raise InputError(
                "normalize stands for what is done to raw frames, but no input is uint8.",
                expected="example inputs and calibration data with frames in uint8, 0 to 255",
                got=[f"{spec.name}: {spec.dtype}" for spec in made.inputs],
                remedy="give the frames before they are scaled and normalised",
            )
        exported = export_for_mobilint(made.flat, made.inputs, made.outputs, made.calibrating, folder / MODEL)
        attentions = len(exported.score_products)
        bits = bits_for(precision, attentions)
        if options.score_bits == 16 and not attentions:
            raise CompileError(
                "This head has no attention whose scores could have 16 bits.",
                expected="score_bits=8",
                got="score_bits=16",
            )
        (folder / ARTIFACT).mkdir()
        build(made, folder / ARTIFACT)
        write_kit(folder, exported, options, bits, made.calibrating, made.judging)
    if installed_compiler() is None:
        raise _missing(kit, output)
    artifact = finish(run_script(kit), output, overwrite=overwrite)
    shutil.rmtree(kit, ignore_errors=True)
    return artifact


def _missing(kit: Path, output: Path) -> CompilerMissingError:
    return CompilerMissingError(
        f"Mobilint's compiler is not installed here. All that it needs was written to the compile kit {kit}.",
        expected="the module qbcompiler (https://dl.mobilint.com, or the container of the kit's README.md; not PyPI)",
        remedy=_next_steps(kit, output),
    )


def _waiting(kit: Path, output: Path, module: nn.Module) -> CompileError | ArtifactError:
    """For a kit that is there already: of this head, or of another one."""
    found = read_kit(kit)
    if found.artifact.manifest["source"]["state"] != state_sha256(module):
        return ArtifactError(
            f"The compile kit {kit} is there already, and is of another module.",
            expected="a new path, or the kit of the same weights",
            remedy="choose another output, delete the kit, or pass overwrite=True",
        )
    if (kit / MXQ).is_file():
        return CompilerMissingError(
            f"The compile kit {kit} was compiled, but not made an artifact yet.",
            remedy=f"lightning-npu compile --finish {kit / MXQ} -o {output}, on the machine with the board; or pass "
            "overwrite=True to write the kit again",
        )
    return CompilerMissingError(
        f"The compile kit {kit} of this module is there already and waits to be compiled.",
        remedy=_next_steps(kit, output) + "; or pass overwrite=True to write the kit again",
    )


def _next_steps(kit: Path, output: Path) -> str:
    return (
        f"1. python compile.py in {kit}, in the vendor's container (its README.md has the command); "
        f"2. lightning-npu compile --finish {kit / MXQ} -o {output}, on the machine with the board. "
        f"Until then train with the same head on the CPU: NPUFrozenModule('{kit / ARTIFACT}')"
    )


class _Normalized(nn.Module):
    """A module behind ``(frame / 255 - mean) / std`` for every uint8 image that it is given; called in the same way."""

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, figures: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
        for name in ("mean", "std"):
            values = torch.tensor([float(value) for value in figures[name]], device=device)
            self.register_buffer(name, values[:, None, None])

        def forward(*args: Any, **kwargs: Any) -> Any:
            return module(*map(self._normalized, args), **{key: self._normalized(v) for key, v in kwargs.items()})

        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self.forward = forward

    def _normalized(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            return value
        if value.ndim != 4 or value.shape[1] != self.mean.shape[0]:
            raise InputError(
                "A uint8 input does not fit the normalisation.",
                expected=f"frames (N, {self.mean.shape[0]}, H, W)",
                got=list(value.shape),
            )
        return (value.float() / 255 - self.mean) / self.std
