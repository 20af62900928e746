"""Verify a Mobilint board with an artifact or a bare MXQ, and print a Markdown report."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import click

from lightning_npu.doctor_mobilint import examine_mobilint
from lightning_npu.errors import NPUError
from lightning_npu.runtimes.cpu import available_cores, instruction_set
from lightning_npu.runtimes.mobilint import library
from lightning_npu.runtimes.mobilint.mxq import check_mxq
from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime
from lightning_npu.verify_mobilint.bench import Bench, Result
from lightning_npu.verify_mobilint.checks import CHECKS
from lightning_npu.verify_mobilint.power import sensors

NO_CARD = 2
NOT_PROVOKED = (
    "a call that never returns, a board that is pulled out, and out of device memory are not provoked here",
    "multi-hour runs and several boards under DDP are not covered",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="ARTIFACT.npu|MODEL.mxq", required=False, type=click.Path(path_type=Path))
@click.option("--device", type=click.IntRange(min=0), help="Number of the device; default: the first.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each timed part takes.")
def main(target: Path | None, device: int | None, seconds: float) -> None:
    """Check on a board what could not be checked without one, and print a report to paste into an issue.

    Ends with status 0 if nothing failed, 1 if something did, 2 if there is no board to check.
    """
    try:
        numbers = library.device_numbers(library.load())
    except NPUError as error:
        numbers, reason = [], " ".join(str(error).split())
    else:
        reason = "qbruntime finds no ARIES device"
    if not numbers:
        click.echo(f"There is no Mobilint board to verify: {reason}.\n", err=True)
        for name, ok, text in examine_mobilint():
            click.echo(f"{'[ok]' if ok else '[--]'}  {name:<20}  {text}", err=True)
        sys.exit(NO_CARD)
    if target is None:
        raise click.UsageError("Name an artifact for target 'mobilint' or an MXQ file to run on the board.")
    try:
        report, failed = verify(target, numbers[0] if device is None else device, seconds)
    except NPUError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    click.echo(report)
    sys.exit(1 if failed else 0)


def verify(target: Path, number: int, seconds: float) -> tuple[str, bool]:
    """Run all checks; the report, and whether one failed.

    Args:
        target: an artifact folder or an MXQ file.
        number: the device.
        seconds: how long each timed part takes.

    Raises:
        NPUError: the target cannot be opened at all.
    """
    artifact, mode = target.is_dir(), None
    path = target
    if artifact:
        from lightning_npu.artifact import Artifact

        loaded = Artifact.load(target)
        path = loaded.file("mxq")
        mode = str(loaded.manifest["mobilint"]["core_mode"])
    check_mxq(path)
    bench = Bench(library.load(), path, number, seconds, None if mode in (None, "all") else mode)
    bench.find_mode()
    checks: dict[str, Callable[[Bench], Result]] = {**CHECKS, "power and utilisation": sensors}
    if artifact:
        checks["fidelity on this board"] = lambda bench: _fidelity(target, bench)
    results = {}
    for name, check in checks.items():
        click.echo(f"{name} ...", err=True)
        try:
            results[name] = check(bench)
        except Exception as error:  # one failure must not hide the other findings
            results[name] = Result("FAIL", " ".join(f"{type(error).__name__}: {error}".split())[:500])
    failed = any(result.verdict == "FAIL" for result in results.values())
    return _report(target, bench, results), failed


def _fidelity(target: Path, bench: Bench) -> Result:
    from lightning_npu.artifact import Artifact
    from lightning_npu.remeasure import remeasure

    loaded = Artifact.load(target)
    runtime = MobilintRuntime.open(loaded, device_index=bench.number, ranks_per_device=1)
    try:
        found = remeasure(loaded, runtime, always=True)
    finally:
        runtime.close()
    if found is None:
        return Result("skipped", "the artifact holds no samples to measure with")
    parts = [f"{name}: cosine {f.cosine:.5f}, SQNR {f.sqnr_db:.1f} dB" for name, f in found.items()]
    return Result("pass", "; ".join(parts))


def _report(target: Path, bench: Bench, results: dict[str, Result]) -> str:
    size, now = bench.path.stat().st_size, datetime.now(timezone.utc).isoformat(timespec="minutes")
    lines = [
        "## Mobilint board: verification report",
        "",
        f"- lightning-npu {version('lightning-npu')}, Python {platform.python_version()}, {platform.platform()}",
        f"- host {instruction_set()}, {available_cores()} cores; {now}",
        f"- `{target.name}` ({size:,} bytes), device {bench.number}, mode {bench.mode}, {bench.seconds:g} s per part",
        *[f"- {name}: {text}" for name, _, text in examine_mobilint()],
        "",
        "| check | verdict | seen |",
        "|---|---|---|",
        *[
            f"| {name} | {result.verdict} | {result.text.replace('|', chr(92) + '|')} |"
            for name, result in results.items()
        ],
        "",
        *[f"Not verified: {line}." for line in NOT_PROVOKED],
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
