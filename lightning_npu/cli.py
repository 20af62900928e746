"""The command ``lightning-npu``: ``doctor``, ``compile``, ``inspect``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_npu.errors import CompilerMissingError, NPUError

if TYPE_CHECKING:
    from lightning_npu.artifact import Artifact, OutputFidelity


_UNFINISHED = 3
CORE_MODES = ("single", "global4", "global8", "all")


class _Group(click.Group):
    """Prints this package's errors as text: they already say what to do, a traceback would hide it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CompilerMissingError as error:  # all that can be done here was done
            click.echo(f"{error}", err=True)
            ctx.exit(_UNFINISHED)
        except NPUError as error:
            click.echo(f"Error: {error}".replace("overwrite=True", "--overwrite"), err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lightning-npu")
def main() -> None:
    """Run the frozen part of a PyTorch Lightning model on a low-power inference accelerator."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can run and, for each thing that it cannot, what to do.

    Ends with status 1 when no runtime works.
    """
    from lightning_npu.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            click.echo(f"{finding.mark}  {finding.name:<{width}}  {finding.text}")
    if not any(finding.ok for finding in findings if finding.kind == "runtime"):
        click.echo("No runtime works here, so no artifact can be executed.", err=True)
        sys.exit(1)


@main.command("compile")
@click.argument("module", metavar="[MODULE:NAME]", required=False)
@click.option(
    "--calibration",
    metavar="FILE|MODULE:NAME",
    help="An .npy file (one input), an .npz file (one array per input, by name), or a Python object or function "
    "that gives an iterable of inputs.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact folder to write.")
@click.option("--cut", help="Dotted name of the last submodule to compile; what follows stays in torch.")
@click.option(
    "--target", default="onnx", show_default=True, type=click.Choice(["onnx", "mobilint"]), help="What to compile for."
)
@click.option("--precision", default="a8w8", show_default=True, type=click.Choice(["a8w8", "a16w8", "fp32"]))
@click.option("--recipe", default="faithful", show_default=True, type=click.Choice(["faithful", "fast"]))
@click.option("--batch-size", type=click.IntRange(min=1), help="Fix the batch; default: dynamic.")
@click.option("--min-sqnr-db", default=20.0, show_default=True, help="The least SQNR of every output, in dB.")
@click.option("--overwrite", is_flag=True, help="Replace an artifact or compile kit that is there already.")
@click.option("--core-mode", type=click.Choice(CORE_MODES), help="mobilint: the core mode of the MXQ; default: single.")
@click.option("--score-bits", type=click.Choice(["8", "16"]), help="mobilint: bits of attention scores; default: 8.")
@click.option("--mean", metavar="R,G,B", help="mobilint: take raw uint8 frames; the mean of (x / 255 - mean) / std.")
@click.option("--std", metavar="R,G,B", help="mobilint: the standard deviation that goes with --mean.")
@click.option(
    "--finish", type=click.Path(path_type=Path), metavar="KIT/model.mxq", help="Make an artifact of this MXQ."
)
@click.option("--no-fidelity", is_flag=True, help="mobilint: make an artifact without measuring on the board.")
def compile_command(
    module: str | None, calibration: str | None, output: Path, finish: Path | None, overwrite: bool, **options: Any
) -> None:
    """Compile an nn.Module, or the function of no arguments that builds one, into an artifact.

    MODULE:NAME is imported with the working directory on the path, as in `my_package.policy:build_encoder`.

    For `--target mobilint` where the vendor's compiler is not installed, a compile kit is written beside the artifact's
    place, and the command ends with status 3; `--finish KIT/model.mxq` makes the artifact of what the kit's compile.py
    wrote, and takes neither a module nor calibration data.
    """
    from lightning_npu.cli_compile import compile_module_named, finish_kit

    if finish is not None:
        artifact = finish_kit(finish, module, calibration, output, overwrite, options)
    else:
        artifact = compile_module_named(module, calibration, output, overwrite, options)
    click.echo(_describe(artifact))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the manifest; with --measure, the figures under 'measured'."
)
@click.option("--measure", is_flag=True, help="Measure fidelity again, on this machine.")
def inspect(artifact: Path, as_json: bool, measure: bool) -> None:
    """Verify an artifact and say what is in it."""
    from lightning_npu.artifact import Artifact

    loaded = Artifact.load(artifact)
    device, measured = _measure(loaded) if measure else ("", None)
    if as_json:
        from lightning_npu.runtimes.cpu import instruction_set

        figures = None if measured is None else {name: f.to_json() for name, f in measured.items()}
        now = {"device": device, "instruction_set": instruction_set(), "outputs": figures}
        click.echo(json.dumps({**loaded.manifest, **({"measured": now} if measure else {})}, indent=1))
        return
    click.echo(_describe(loaded))
    if measured is not None:
        from lightning_npu.compile.fidelity import format_table

        click.echo(f"\nmeasured now on {device}:\n{format_table(measured)}")


def _measure(artifact: Artifact) -> tuple[str, Mapping[str, OutputFidelity] | None]:
    """The device and what was measured on it; None where the artifact holds no samples to measure with."""
    from lightning_npu.remeasure import remeasure
    from lightning_npu.runtimes.base import open_runtime

    runtime = open_runtime(artifact)
    try:
        return runtime.device, remeasure(artifact, runtime, always=True)
    finally:
        runtime.close()


def _elsewhere(judged: str, here: str) -> str:
    return "" if judged == here else f"; NOT measured on this machine ({here}): use --measure"


def _counts(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(nodes.items()))


def _describe(artifact: Artifact) -> str:
    from lightning_npu.compile.fidelity import format_table
    from lightning_npu.runtimes.cpu import instruction_set

    manifest = artifact.manifest
    source, judged = manifest["source"], manifest["fidelity"]
    elsewhere = _elsewhere(judged["instruction_set"], instruction_set())
    lines = [
        f"{artifact.path}",
        f"  fingerprint  {artifact.fingerprint}",
        f"  made from    {source['module']}, {source['parameters']:,} parameters"
        + (f", cut after '{source['cut']}'" if source["cut"] else ""),
        f"  precision    {artifact.precision}, recipe '{manifest['recipe']['name']}', for target '{artifact.target}'",
        *([f"  in float     {_counts(floats)}"] if (floats := manifest["recipe"].get("float_nodes")) else []),
        f"  calibration  {manifest['calibration']['samples']} samples, "
        f"{manifest['calibration']['holdout_samples']} held out to judge fidelity",
        f"  created      {manifest['created']} with "
        + ", ".join(f"{tool} {number}" for tool, number in manifest["tools"].items()),
    ]
    for title, specs in (("inputs", artifact.inputs), ("outputs", artifact.outputs)):
        lines.append(f"  {title}")
        lines += [f"    {spec.name:<16} {spec.dtype:<8} {spec.describe_shape()}" for spec in specs]
    lines.append("  files")
    lines += [f"    {role:<16} {entry['path']} ({entry['bytes']:,} bytes)" for role, entry in manifest["files"].items()]
    if (section := manifest.get("mobilint")) is not None:
        lines.append(f"  mobilint     {_build(section)}")
    if not artifact.fidelity:
        lines.append("  fidelity     not measured: it is when a device first opens the artifact, or with --measure")
        return "\n".join(lines)
    lines.append(f"  fidelity, through '{judged['runtime']}' on {judged['instruction_set']}{elsewhere}")
    lines += [f"    {line}" for line in format_table(artifact.fidelity).splitlines()]
    return "\n".join(lines)


def _build(section: Mapping[str, Any]) -> str:
    """How the MXQ was built, in one line."""
    compiler, bits = section["compiler"], section["bits"]
    wide = sorted(name for name, value in bits["activation"].items() if value != 8)
    wide += [f"{len(bits['score_layers'])} products of queries and keys"] * bool(bits["score_layers"])
    return (
        f"{section['file']} by {compiler['name']} {compiler['version']} for {compiler['target_device']}, core mode "
        f"{section['core_mode']}, {'16 bits in ' + ', '.join(wide) if wide else '8 bits throughout'}; inputs "
        + ", ".join(f"{entry['dtype']} {entry['shape']}" for entry in section["inputs"])
    )
