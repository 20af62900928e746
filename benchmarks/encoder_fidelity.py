"""Fidelity of the paper-size encoder at every cut, one remedy against another.

Calibrates on crops of some photographs, judges on crops of others, always through ONNX Runtime on this processor.
``python benchmarks/encoder_fidelity.py`` prints a Markdown table and writes outputs/encoder_fidelity.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from least_error import least_error_ranges
from paper_encoder import MAX_LAYERS, SIZES, WIDTH, encoder
from photographs import CALIBRATION, TEST, crops

from lightning_npu.compile.calibrate import calibrate
from lightning_npu.compile.export import export_onnx
from lightning_npu.compile.fidelity import OutputFidelity, measure
from lightning_npu.compile.insert import OPERATORS, WeightType, insert_qdq, prepare
from lightning_npu.compile.qdq import QuantizedGraph
from lightning_npu.compile.quantize import quantize_onnx
from lightning_npu.compile.rewrite import biases_into_products, keep_scores_in_float
from lightning_npu.compile.rounding import WeightRounding
from lightning_npu.compile.stem import stem_on_blocks
from lightning_npu.runtimes.cpu import exact_u8s8, instruction_set
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec

BATCH = 4
Batches = list[Mapping[str, np.ndarray]]
S8, S8_REDUCED = WeightType(signed=True, reduce_range=False), WeightType(signed=True, reduce_range=True)
PRODUCTS = ("Conv", "Gemm", "MatMul", "Relu", "MaxPool", "Reshape", "Transpose")


@dataclass
class Bench:
    """One set of weights at one image size: the FP32 file, the data, and what several remedies share."""

    source: Path
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    calibration: Batches
    test: Batches
    scratch: Path

    def __post_init__(self) -> None:
        self.plain = prepare(self.source, self.scratch / "prepared.onnx")
        self.model = stem_on_blocks(biases_into_products(self.plain))
        self.extremes = calibrate(self.model, self.calibration)
        self.plain_extremes = calibrate(self.plain, self.calibration)
        self.rounding = WeightRounding(self.model)
        self.rounding.observe(self.calibration)

    def fidelity(self, target: Path) -> dict[str, OutputFidelity]:
        """Per cut, against the FP32 file, on the test images."""
        import torch

        runtimes = [OnnxRuntime(path, self.inputs, self.outputs) for path in (self.source, target)]
        return measure(*runtimes, ([torch.from_numpy(batch["image"])] for batch in self.test))

    def by_hand(
        self,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        *,
        weights: WeightType = S8,
        biases: bool = True,
        scores: bool = True,
        rounding: bool = True,
        per_channel: bool = True,
        operators: tuple[str, ...] = OPERATORS,
    ) -> Path:
        """A file quantised with some remedies and without others."""
        source, extremes = (self.model, self.extremes) if biases else (self.plain, self.plain_extremes)
        model = insert_qdq(source, ranges or extremes, weights, "a8w8", per_channel=per_channel, operators=operators)
        if rounding:
            self.rounding.apply(model, largest=weights.largest)
        if scores:
            keep_scores_in_float(model)
        target = self.scratch / "by_hand.onnx"
        onnx.save(model, target)
        return target

    def package(self, calibration: Batches | None = None, **options: str) -> Path:
        """A file as the package makes it."""
        target = self.scratch / "package.onnx"
        quantize_onnx(self.source, target, calibration or self.calibration, **options)
        return target

    def onnxruntime_ranges(self, method: str) -> dict[str, tuple[float, float]]:
        """Ranges by one of ONNX Runtime's own histogram methods, "Percentile" or "Entropy"."""
        from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

        path = self.scratch / "prepared.onnx"
        onnx.save(self.model, path)
        options = {"percentile": 99.99} if method == "Percentile" else {}
        calibrator = create_calibrator(
            path, None, str(self.scratch / "augmented.onnx"), CalibrationMethod[method], extra_options=options
        )
        for batch in self.calibration:
            calibrator.collect_data(_Reader(batch))
        data = calibrator.compute_data()
        return {name: tuple(float(np.squeeze(edge)) for edge in data[name].range_value) for name in data}


class _Reader:
    """What ONNX Runtime's calibrators read, for one batch."""

    def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
        self._left = [batch]

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


def remedies(bench: Bench, *, histograms: bool) -> dict[str, Callable[[], Path]]:
    """Name of each row, and what makes its file."""
    by_hand = bench.by_hand
    plain = {"biases": False, "scores": False, "rounding": False}
    rows: dict[str, Callable[[], Path]] = {
        "min-max, a scale per tensor": lambda: by_hand(**plain, per_channel=False),
        "min-max, a scale per channel": lambda: by_hand(**plain),
        "+ biases in the accumulator": lambda: by_hand(scores=False, rounding=False),
        "+ attention scores unrounded": lambda: by_hand(rounding=False),
        "+ second-order rounding = **faithful**": lambda: bench.package(recipe="faithful"),
        "**fast**": lambda: bench.package(recipe="fast"),
        "faithful where there is no VNNI (uint8 weights)": lambda: bench.package(instruction_set="x86_64-avx2"),
        "fast where there is no VNNI (7-bit weights)": lambda: bench.package(
            recipe="fast", instruction_set="x86_64-avx2"
        ),
        "7-bit weights without the remedies": lambda: by_hand(weights=S8_REDUCED, **plain),
        "faithful with least-error ranges": lambda: by_hand(
            least_error_ranges(bench.model, bench.calibration, bench.extremes, 256)
        ),
        "faithful with ranges 20 % wider": lambda: by_hand(
            {name: (1.2 * low, 1.2 * high) for name, (low, high) in bench.extremes.items()}
        ),
        "faithful, sums and norms in float": lambda: by_hand(operators=PRODUCTS),
        "faithful, calibrated on 32 images": lambda: bench.package(bench.calibration[: 32 // BATCH]),
        "faithful, calibrated on 8 images": lambda: bench.package(bench.calibration[: 8 // BATCH]),
        "faithful, **a16w8**": lambda: bench.package(precision="a16w8"),
    }
    if histograms:
        rows["faithful with percentile 99.99"] = lambda: by_hand(bench.onnxruntime_ranges("Percentile"))
        rows["faithful with entropy ranges"] = lambda: by_hand(bench.onnxruntime_ranges("Entropy"))
    return rows


def run(weights: str, size: tuple[int, int], images: tuple[int, int], *, histograms: bool, scratch: Path) -> list[dict]:
    """All rows for one set of weights: name, precision, SQNR and cosine per cut."""
    tokens = -(-size[0] // 32) * -(-size[1] // 32)
    inputs = [TensorSpec("image", (None, 3, *size))]
    outputs = [TensorSpec(f"L{cut}", (None, tokens, WIDTH)) for cut in range(MAX_LAYERS + 1)]
    pixels = [crops(CALIBRATION, size, images[0], seed=11), crops(TEST, size, images[1], seed=77)]
    calibration, test = ([{"image": part.numpy()} for part in data.split(BATCH)] for data in pixels)
    source = scratch / f"{weights}.onnx"
    export_onnx(
        encoder(weights, MAX_LAYERS, size, every_cut=True), (pixels[0][:2],), source, inputs=inputs, outputs=outputs
    )
    bench = Bench(source, inputs, outputs, calibration, test, scratch)
    rows = []
    for name, make in remedies(bench, histograms=histograms).items():
        start = time.perf_counter()
        target = make()
        seconds = time.perf_counter() - start
        figures = bench.fidelity(target)
        rows.append(
            {
                "weights": weights,
                "size": list(size),
                "remedy": name,
                "precision": QuantizedGraph(onnx.load(target)).precision,
                "sqnr_db": {cut: round(value.sqnr_db, 2) for cut, value in figures.items()},
                "cosine": {cut: round(value.cosine, 6) for cut, value in figures.items()},
                "build_s": round(seconds, 1),
            }
        )
        cells = " | ".join(f"{value.sqnr_db:.1f}" for value in figures.values())
        print(f"| {name} | {rows[-1]['precision']} | {cells} |", flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=("trained", "he"), default=["trained", "he"])
    parser.add_argument("--size", choices=SIZES, default="224")
    parser.add_argument("--images", nargs=2, type=int, default=(128, 28), metavar=("CALIBRATE", "TEST"))
    parser.add_argument("--histograms", action="store_true", help="also ONNX Runtime's own, slow histogram methods")
    parser.add_argument("--output", type=Path, default=Path("outputs/encoder_fidelity.json"))
    arguments = parser.parse_args()
    exact = "exact" if exact_u8s8() else "saturating: the rows with int8 weights are wrong here"
    print(f"{instruction_set()}, products of uint8 and int8 {exact}; images {arguments.size} px, SQNR in dB\n")
    rows = []
    for weights in arguments.weights:
        print(f"| {weights} weights | precision | L0 | L1 | L2 | L3 | L4 |\n|---|---|---|---|---|---|---|", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            rows += run(
                weights,
                SIZES[arguments.size],
                tuple(arguments.images),
                histograms=arguments.histograms,
                scratch=Path(scratch),
            )
        print()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"instruction_set": instruction_set(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
