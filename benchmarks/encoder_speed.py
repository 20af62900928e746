"""Speed of the paper-size encoder: torch, ONNX Runtime and OpenVINO, FP32 and INT8, on this processor.

Each variant lives in a process of its own, with its own number of threads; they take turns, so that what else runs on
the machine slows all alike. One thread is judged by CPU time of the process, which a busy machine changes little; more
threads by wall time, which wants a quiet machine. ``python benchmarks/encoder_speed.py`` prints a Markdown table of
medians in milliseconds and ratios to torch eager, and writes outputs/encoder_speed.json.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

OUTPUTS = Path(__file__).resolve().parent.parent / "outputs"
FILES = OUTPUTS / "encoder_speed"
VARIANTS = (
    "torch eager FP32",
    "torch.compile FP32",
    "runtime FP32",
    "runtime INT8 faithful",
    "runtime INT8 fast",
    "runtime INT8 faithful, file for no VNNI",
    "OpenVINO FP32",
    "OpenVINO INT8",
)
SIZES = {"224": (224, 224), "480": (480, 640)}


def reason_to_skip(variant: str) -> str | None:
    """Why a variant cannot run here."""
    needed = {"OpenVINO FP32": ("openvino",), "OpenVINO INT8": ("openvino", "nncf")}.get(variant, ())
    missing = [name for name in needed if find_spec(name) is None]
    return f"not installed: pip install {' '.join(missing)}" if missing else None


def specs(cut: int, size: tuple[int, int]) -> tuple[list, list]:
    """Input and output of the encoder up to a cut, with a dynamic batch."""
    from paper_encoder import WIDTH

    from lightning_npu.tensor_spec import TensorSpec

    tokens = -(-size[0] // 32) * -(-size[1] // 32)
    return [TensorSpec("image", (None, 3, *size))], [TensorSpec("tokens", (None, tokens, WIDTH))]


@functools.cache
def _code_version() -> str:
    """Changes when the code that makes the files does, so that no stale file is measured."""
    import lightning_npu.compile

    sources = sorted(Path(lightning_npu.compile.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


def file(kind: str, cut: int, side: str) -> Path:
    """The ONNX file of one kind; made when it is not there yet."""
    from paper_encoder import encoder
    from photographs import CALIBRATION, crops

    from lightning_npu.compile.export import export_onnx
    from lightning_npu.compile.quantize import quantize_onnx
    from lightning_npu.runtimes.cpu import instruction_set

    target = FILES / f"L{cut}_{side}_{kind}_{instruction_set()}_{_code_version()}.onnx"
    if target.exists():
        return target
    FILES.mkdir(parents=True, exist_ok=True)
    size = SIZES[side]
    if kind == "fp32":
        inputs, outputs = specs(cut, size)
        import torch

        export_onnx(encoder("he", cut, size), (torch.rand(2, 3, *size),), target, inputs=inputs, outputs=outputs)
        return target
    images = crops(CALIBRATION, size, 16, seed=11).split(4)
    options = {"recipe": "fast" if kind == "fast" else "faithful"}
    if kind == "no-vnni":
        options["instruction_set"] = "x86_64-avx2"
    quantize_onnx(file("fp32", cut, side), target, [{"image": part.numpy()} for part in images], **options)
    return target


def make(variant: str, cut: int, side: str, batch: int, threads: int) -> Callable[[], object]:
    """What is timed: one call on one batch."""
    import torch

    torch.set_num_threads(threads)
    image = torch.rand(batch, 3, *SIZES[side], generator=torch.Generator().manual_seed(0))
    if variant.startswith("torch"):
        from paper_encoder import encoder

        module = encoder("he", cut, SIZES[side])
        if "compile" in variant:
            torch._dynamo.reset()
            module = torch.compile(module, options={"freezing": True})

        def call() -> object:
            with torch.inference_mode():
                return module(image)

        return call
    if variant.startswith("runtime"):
        from lightning_npu.runtimes.onnx import OnnxRuntime

        kind = {"FP32": "fp32", "faithful": "faithful", "fast": "fast"}.get(variant.split()[-1], "no-vnni")
        inputs, outputs = specs(cut, SIZES[side])
        runtime = OnnxRuntime(file(kind, cut, side), inputs, outputs, threads=threads)
        return lambda: runtime.run([image])
    return _openvino("INT8" in variant, cut, side, batch, threads, image.numpy())


def _openvino(int8: bool, cut: int, side: str, batch: int, threads: int, image: object) -> Callable[[], object]:
    import openvino

    core = openvino.Core()
    model = core.read_model(file("fp32", cut, side))
    model.reshape([batch, 3, *SIZES[side]])
    if int8:
        import nncf
        from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet
        from photographs import CALIBRATION, crops

        nncf.set_log_level(logging.ERROR)
        images = [part.numpy() for part in crops(CALIBRATION, SIZES[side], 2 * batch, seed=11).split(batch)]
        model = nncf.quantize(
            model,
            nncf.Dataset(images),
            model_type=nncf.ModelType.TRANSFORMER,
            advanced_parameters=AdvancedQuantizationParameters(
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX
            ),
        )
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", options).create_infer_request()
    return lambda: request.infer([image], share_inputs=True, share_outputs=True)


def work(variant: str, threads: int, pipe: Connection) -> None:
    """A worker: makes what it is told to, times it when it is its turn."""
    call: Callable[[], object] | None = None
    while True:
        order = pipe.recv()
        try:
            if order is None:
                return
            if order[0] == "make":
                call = make(variant, *order[1:], threads)
                for _ in range(2):
                    call()
                pipe.send(None)
            elif call is not None:
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(order[1]):
                    call()
                spent = time.perf_counter() - wall, time.process_time() - cpu
                pipe.send([seconds / order[1] for seconds in spent])
        except Exception as error:  # one variant that fails must not end the others
            pipe.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def measure(
    variants: list[str], threads: int, shapes: list[tuple[int, str, int]], rounds: int
) -> list[dict[str, object]]:
    """Rows of one number of threads: all variants take turns, shape by shape."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for variant in variants:
        pipes[variant], end = context.Pipe()
        processes.append(context.Process(target=work, args=(variant, threads, end), daemon=True))
        processes[-1].start()
    rows: list[dict[str, object]] = []
    for cut, side, batch in shapes:
        alive = []
        for variant, pipe in pipes.items():  # one after the other: building is heavy
            pipe.send(("make", cut, side, batch))
            failure = pipe.recv()
            if failure is None:
                alive.append(variant)
            else:
                print(f"{variant} failed at L{cut}, {side} px, batch {batch}: {failure}", flush=True)
        repeats = 1 if batch * (1 if side == "224" else 6) >= 6 else 3
        times: dict[str, list[list[float]]] = {variant: [] for variant in alive}
        for _ in range(rounds):
            for variant in alive:
                pipes[variant].send(("time", repeats))
                spent = pipes[variant].recv()
                if not isinstance(spent, str):
                    times[variant].append(spent)
        for variant, spent in times.items():
            wall, cpu = (statistics.median(pair[index] for pair in spent) for index in (0, 1))
            row = {"cut": f"L{cut}", "size": side, "batch": batch, "threads": threads, "variant": variant}
            rows.append({**row, "wall_s": wall, "cpu_s": cpu})
        show(rows[-len(times) :], threads)
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join(10)
    return rows


def show(rows: list[dict[str, object]], threads: int) -> None:
    """Print one shape as a Markdown table."""
    clock = "cpu_s" if threads == 1 else "wall_s"
    base = next((row[clock] for row in rows if row["variant"] == VARIANTS[0]), None)
    first = rows[0]
    plural = "thread" if threads == 1 else "threads"
    print(f"\n| {first['cut']}, {first['size']} px, batch {first['batch']}, {threads} {plural} | ms | x torch eager |")
    print("|---|---|---|")
    for row in rows:
        ratio = f"{base / row[clock]:.2f}" if isinstance(base, float) else "-"
        print(f"| {row['variant']} | {1e3 * row[clock]:.1f} | {ratio} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", default="L0,L1,L2,L3,L4")
    parser.add_argument("--sizes", default="224,480", help="224 (224x224), 480 (480x640)")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--variants", default=",".join(VARIANTS).replace(", file", "; file"))
    parser.add_argument("--quick", action="store_true", help="L4 at 224 px, one thread, 5 rounds, without compilers")
    parser.add_argument("--output", type=Path, default=OUTPUTS / "encoder_speed.json")
    arguments = parser.parse_args()
    variants = [name.strip().replace("; file", ", file") for name in arguments.variants.split(",")]
    if arguments.quick:
        arguments.cuts, arguments.sizes, arguments.threads, arguments.rounds = "L4", "224", "1", 5
        variants = [name for name in variants if "compile" not in name and "OpenVINO" not in name]
    for variant in list(variants):
        if reason := reason_to_skip(variant):
            print(f"{variant} is skipped: {reason}")
            variants.remove(variant)
    from lightning_npu.runtimes.cpu import available_cores, instruction_set

    print(
        f"{instruction_set()}, {available_cores()} cores, load {os.getloadavg()[0]:.1f}; 1 thread: CPU time, else wall"
    )
    shapes = [
        (int(cut.strip("L ")), side, int(batch))
        for side in arguments.sizes.split(",")
        for cut in arguments.cuts.split(",")
        for batch in arguments.batches.split(",")
    ]
    for cut, side in dict.fromkeys((cut, side) for cut, side, _ in shapes):  # not in the workers' time
        for kind in ("fp32", "faithful", "fast", "no-vnni"):
            file(kind, cut, side)
    rows = []
    for threads in map(int, arguments.threads.split(",")):
        rows += measure(variants, threads, shapes, arguments.rounds)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"instruction_set": instruction_set(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
