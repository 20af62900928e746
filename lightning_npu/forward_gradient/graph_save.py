"""Writes an artifact whose layers were trained inside the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from lightning_npu.artifact import Artifact, new_folder, write_manifest
from lightning_npu.compile.fidelity import measure
from lightning_npu.compile.qdq import QuantizedGraph
from lightning_npu.forward_gradient import graph_edit
from lightning_npu.forward_gradient.graph_edit import Layer
from lightning_npu.forward_gradient.graph_layers import graph_of
from lightning_npu.hashing import tensor_sha256
from lightning_npu.remeasure import load_probe
from lightning_npu.runtimes.cpu import instruction_set
from lightning_npu.runtimes.onnx import OnnxRuntime

_DERIVED = ("format", "schema_version", "created", "files", "fingerprint", "manifest_sha256")


def save(
    artifact: Artifact,
    output: Path,
    layers: Sequence[Layer],
    stored: Mapping[str, np.ndarray[Any, Any]],
    floats: Mapping[str, np.ndarray[Any, Any]],
    *,
    bits: int,
    headroom: int,
    wide_outputs: bool,
    overwrite: bool,
) -> Artifact:
    """Write ``artifact`` with new weights in ``layers`` to ``output``.

    Args:
        artifact: what was trained.
        output: the new folder.
        layers: the trained layers.
        stored: per layer, the integers as the graph stores them.
        floats: per layer, what they stand for.
        bits: of the trained weights.
        headroom: of the trained weights.
        wide_outputs: whether outputs of the layers stay in the accumulator's width.
        overwrite: replace an artifact that is at ``output``.
    """
    artifact.verify()
    model = graph_of(artifact)
    reference = onnx.load(artifact.file("reference"), load_external_data=False)
    if wide_outputs:
        model = graph_edit.leave_outputs_wide(model, layers)
    model = graph_edit.with_values(model, layers, stored, bits=bits, headroom=headroom)
    reference = graph_edit.with_floats(reference, layers, floats)
    with new_folder(output, overwrite=overwrite) as folder:
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        (folder / "reference.onnx").write_bytes(reference.SerializeToString())
        roles = {"model": "model.onnx", "reference": "reference.onnx"}
        content = {key: value for key, value in artifact.manifest.items() if key not in _DERIVED}
        content = json.loads(json.dumps(content))
        if "probe" in artifact.manifest["files"]:
            (folder / "probe.npz").write_bytes(artifact.file("probe").read_bytes())
            roles["probe"] = "probe.npz"
            content["fidelity"] = _fidelity(artifact, folder)
        graph = QuantizedGraph(model)
        content["precision"] = graph.precision
        content["recipe"] |= {"node_counts": dict(graph.node_counts), "float_nodes": dict(graph.float_nodes)}
        names = ", ".join(layer.name for layer in layers)
        content["recipe"]["remedies"] = [
            *content["recipe"].get("remedies", []),
            f"trained in the graph by forward gradients, weights in {bits} bits: {names}",
        ]
        content["source"] |= {"adapted_from": artifact.fingerprint}
        content["source"]["state"] |= _hashes(content["source"]["state"], layers, floats)
        write_manifest(folder, content, roles)
    return Artifact.load(output)


def _fidelity(artifact: Artifact, folder: Path) -> dict[str, Any]:
    """INT8 with the trained integers against FP32 of what they stand for, on the samples that the artifact carries."""
    reference, candidate = (
        OnnxRuntime(folder / name, artifact.inputs, artifact.outputs) for name in ("reference.onnx", "model.onnx")
    )
    try:
        figures = measure(reference, candidate, [load_probe(artifact)])
    finally:
        reference.close()
        candidate.close()
    return {
        **artifact.manifest["fidelity"],
        "instruction_set": instruction_set(),
        "outputs": {name: figure.to_json() for name, figure in figures.items()},
    }


def _hashes(
    state: Mapping[str, str], layers: Sequence[Layer], floats: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, str]:
    """Weights that would compile to this: so that the artifact is not taken for one of the original weights."""
    return {
        layer.name: tensor_sha256(
            torch.from_numpy(floats[layer.name].T if layer.transposed else floats[layer.name]).float()
        )
        for layer in layers
        if layer.name in state
    }
