"""What writing attention out costs in accuracy: the graph for Mobilint's compiler against torch.

The source paper's encoder at every cut, and ACT encoders as LeRobot builds them, with latent and state tokens as
further inputs; all at full size. ``python benchmarks/mobilint_attention.py`` prints a Markdown table and writes
outputs/mobilint_attention.json. No board and no vendor's compiler are needed: ONNX Runtime runs the graph in FP32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from paper_encoder import MAX_LAYERS, SIZES, encoder
from photographs import TEST, crops
from torch import Tensor, nn

from lightning_npu.compile.attention import ExplicitAttention
from lightning_npu.compile.flat import FlatModule, tensor_specs
from lightning_npu.compile.mobilint_export import export_for_mobilint
from lightning_npu.compile.samples import Samples
from lightning_npu.compile.undisturbed import undisturbed

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from act_encoder import act_front  # noqa: E402

SAMPLES = 3


@dataclass
class Row:
    """One head.

    Attributes:
        head: what it is.
        inputs: names and shapes of one sample.
        attentions: how many were written out.
        largest: the largest magnitude in its outputs.
        torch_error: largest absolute difference between torch's attention and the written-out one, both in torch.
        graph_error: largest absolute difference between torch's module and the graph for the compiler.
        nodes: nodes of that graph.
        export_s: seconds to trace, simplify, check and compare.
    """

    head: str
    inputs: str
    attentions: int
    largest: float
    torch_error: float
    graph_error: float
    nodes: int
    export_s: float


def measure(head: str, module: nn.Module, args: tuple[Tensor, ...], scratch: Path) -> Row:
    """Export ``module`` and compare it with torch on every sample of ``args``."""
    with undisturbed(module, fused_attention=False), torch.no_grad():
        flat = FlatModule(module, args, {}).eval()
        inputs, outputs = tensor_specs(flat)
        original = flat(*args)
        with ExplicitAttention():
            written_out = flat(*args)
        begin = time.perf_counter()
        made = export_for_mobilint(flat, inputs, outputs, Samples(inputs, args, SAMPLES), scratch / "head.onnx")
        seconds = time.perf_counter() - begin
    pairs = list(zip(original, written_out, strict=True))
    return Row(
        head,
        ", ".join(f"{spec.name} {list(spec.shape[1:])}" for spec in inputs),
        made.attentions,
        max(a.abs().max().item() for a, _ in pairs),
        max((a - b).abs().max().item() for a, b in pairs),
        max(made.max_abs_error.values()),
        sum(made.node_counts.values()),
        seconds,
    )


def rows(weights: str, size: tuple[int, int]) -> list[Row]:
    """Every head of the table."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        images = crops(TEST, size, SAMPLES, seed=11)
        found = [
            measure(f"paper encoder L{layers}, {weights} weights", encoder(weights, layers, size), (images,), scratch)
            for layers in range(1, MAX_LAYERS + 1)
        ]
        torch.manual_seed(0)
        further = torch.randn(SAMPLES, 32), torch.randn(SAMPLES, 14)
        small = torch.nn.functional.interpolate(images, size=(120, 160), mode="bilinear")
        for pre_norm in (False, True):
            act = act_front(
                dim_model=512, n_heads=8, dim_feedforward=3200, n_encoder_layers=4, latent_dim=32, state_dim=14,
                pre_norm=pre_norm,
            )  # fmt: skip
            name = f"ACT encoder, {'pre' if pre_norm else 'post'}-norm, 4 layers"
            found.append(measure(name, act, (small, *further), scratch))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", choices=["he", "trained"], default="he")
    parser.add_argument("--size", choices=list(SIZES), default="224")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "mobilint_attention.json")
    chosen = parser.parse_args()
    table = rows(chosen.weights, SIZES[chosen.size])
    print("| head | inputs | attentions | largest output | torch to torch | torch to graph | nodes | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in table:
        print(
            f"| {row.head} | {row.inputs} | {row.attentions} | {row.largest:.3g} | {row.torch_error:.1e} | "
            f"{row.graph_error:.1e} | {row.nodes} | {row.export_s:.1f} |"
        )
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = chosen.output.with_suffix(".tmp")
    temporary.write_text(json.dumps([asdict(row) for row in table], indent=1))
    temporary.replace(chosen.output)


if __name__ == "__main__":
    main()
