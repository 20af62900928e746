"""The README of a compile kit: what it is, and the commands that make an artifact of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_npu.artifact import Artifact
from lightning_npu.compile.fidelity import format_table

_VERSION = "1.3"
_IMAGE = f"mobilint/qbcompiler:{_VERSION}-cpu-ubuntu22.04"
_MODES = {
    "single": "each of the board's 8 cores computes an image",
    "global4": "the 4 cores of a cluster compute an image together",
    "global8": "all 8 cores compute an image together",
    "all": "any of single, global4 and global8 can be chosen when it is opened",
}


def readme(kit: Mapping[str, Any], artifact: Artifact) -> str:
    """Markdown for people who have the kit and nothing else.

    Args:
        kit: kit.json.
        artifact: the head compiled for target "onnx".
    """
    head, compiled = kit["head"], kit["compile"]
    inputs = "\n".join(f"| {entry['name']} | {entry['dtype']} | {entry['shape']} |" for entry in head["inputs"])
    outputs = "\n".join(f"| {entry['name']} | {entry['dtype']} | {entry['shape']} |" for entry in head["outputs"])
    error = max(kit["model"]["max_abs_error"].values())
    return f"""# Compile kit

`{head["module"]}`{f", cut after `{head['cut']}`" if head["cut"] else ""}, {head["parameters"]:,} parameters, made ready
for Mobilint's compiler. Written by lightning-npu {kit["tools"]["lightning-npu"]} on {kit["created"]}.

## 1. Compile

On any x86-64 Linux machine with Docker; no board and no GPU are needed. Get the compiler, a file
`qbcompiler-{_VERSION}.*.whl`, from <https://dl.mobilint.com> (ARIES, qb Compiler; needs an account) into this folder.
Then:

```
docker run --rm --ipc=host -v "$(pwd)":/kit -w /kit {_IMAGE} \\
  sh -c 'python -m pip install ./qbcompiler-*.whl && python compile.py'
```

The image's version has to be the compiler's; the others are at <https://hub.docker.com/r/mobilint/qbcompiler/tags>.
Where `qbcompiler` is installed already, `python compile.py` is enough. Packages of similar names on PyPI are something
else.

This writes `model.mxq` and `model.mxq.json`, which records compiler, version, options and checksums. `compile.py` first
checks that no file of the kit was changed. Expect minutes.

## 2. Make the artifact

Where the board is, with lightning-npu and `mobilint-qb-runtime` installed:

```
lightning-npu compile --finish model.mxq -o encoder.npu
```

This runs the {kit["judging"]["count"]} samples in `judging.npz`, none of which calibrates, through the board and
through FP32, and refuses an MXQ that is not faithful. Without a board, `--no-fidelity` makes an artifact that says
"unmeasured"; it is measured when a board first opens it.

## Until then

`onnx.npu` is the same head for ONNX Runtime on the CPU, complete: `NPUFrozenModule("onnx.npu")`. Its fidelity:

```
{format_table(artifact.fidelity)}
```

## What is in it

| file | what it is |
|---|---|
| `model.onnx` | opset 17, batch 1, attention written out; differs from torch by {error:.2g} at most on real samples |
| `calibration/` | {kit["calibration"]["count"]} samples, height x width x channels, in order; checksums in `kit.json` |
| `compile.py` | checks the kit and calls the compiler; needs no package but the compiler's |
| `kit.json` | options, checksums, inputs and outputs |
| `judging.npz`, `onnx.npu` | what step 2 needs |

| input | dtype | height, width, channels |
|---|---|---|
{inputs}

| output | dtype | height, width, channels |
|---|---|---|
{outputs}

{_pixels(compiled["uint8"])}
Core mode `{compiled["core_mode"]}`: {_MODES[compiled["core_mode"]]}. Bits, as the compiler is told: activations
{_bits(compiled["bits"]["activation"])}; weights {_bits(compiled["bits"]["weight"])}; products of queries and keys
{compiled["score_bits"]}. Convolutions have 8.
"""


def _bits(bits: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in bits.items())


def _pixels(uint8: Mapping[str, Any] | None) -> str:
    if uint8 is None:
        return "No input is uint8: images cross to the board as float32, as the head takes them.\n"
    where = "is left to the compiler, which fuses it into the first layer" if uint8["fused"] else "is in the graph"
    lines = []
    for name, scale in uint8["scales"].items():
        mean, std = ([round(value, 6) for value in scale[key]] for key in ("mean", "std"))
        lines.append(
            f"Input `{name}` is raw pixels, 0 to 255, and so is its calibration data; "
            f"`(x / 255 - {mean}) / {std}` {where}.\n"
        )
    return "".join(lines)
