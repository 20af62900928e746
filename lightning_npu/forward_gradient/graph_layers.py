"""Which layers of an artifact can be trained inside its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from lightning_npu.artifact import Artifact
from lightning_npu.errors import ArtifactError, InputError
from lightning_npu.forward_gradient.graph_edit import Layer, layers_of, without_float
from lightning_npu.forward_gradient.graph_scales import with_useful_scales


def loaded(artifact: Artifact | str | Path) -> Artifact:
    """The artifact, if its weights can be inputs.

    Raises:
        ArtifactError: it is for another target than "onnx".
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    if opened.target != "onnx":
        raise ArtifactError(
            f"Weights inside an artifact for target '{opened.target}' cannot be changed: they are compiled in.",
            expected="an artifact for target 'onnx'",
            got=opened.target,
            remedy="train what stands before it with NPUFrozenModule(gradient='forward'), or what follows it with "
            "ordinary gradients; or adapt the module with target='onnx' and compile it again",
        )
    return opened


def graph_of(artifact: Artifact) -> onnx.ModelProto:
    """The INT8 graph, with scales that weights can be trained on."""
    return with_useful_scales(onnx.load(artifact.file("model"), load_external_data=False))


def trainable(artifact: Artifact) -> dict[str, Layer]:
    """Layers whose new integers can be saved, by torch's name."""
    return {name: layer for name, (layer, reason) in _judged(artifact).items() if reason is None}


def chosen(artifact: Artifact, names: Sequence[str], bits: int) -> list[Layer]:
    """The layers of these names.

    Raises:
        InputError: one is not there, twice there, cannot be saved, or is held in 16 bits where 8 are asked for.
    """
    known = _judged(artifact)
    able = sorted(name for name, (_, reason) in known.items() if reason is None)
    reasons = {name: known[name][1] for name in names if name in known and name not in able}
    if reasons:
        raise InputError(
            "What is trained in these layers could not be saved: the INT8 graph holds them in another form than the "
            "FP32 reference, as it does the first convolution of a stem in blocks.",
            expected=f"some of {able}",
            got=reasons,
            remedy="train other layers: choose among GraphWeights.trainable(artifact)",
        )
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) != len(names):
        raise InputError(
            "There are no such integer weights in the artifact." if unknown else "The choice of layers is wrong.",
            expected=f"some of {able}, each once",
            got=unknown or list(names),
            remedy="choose among GraphWeights.trainable(artifact)",
        )
    layers = [known[name][0] for name in names]
    wide = [layer.name for layer in layers if layer.wide]
    if wide and bits == 8:
        raise InputError(
            "The artifact holds weights in 16 bits, as one that was trained so and saved.",
            expected="weight_bits=16 for them",
            got=f"weight_bits=8 for {wide}",
            remedy="pass weight_bits=16, or begin with the artifact that they were trained from",
        )
    return layers


def _judged(artifact: Artifact) -> Mapping[str, tuple[Layer, str | None]]:
    """Every integer layer, and why it could not be saved."""
    reference = onnx.load(artifact.file("reference"), load_external_data=False)
    narrow = bool(artifact.manifest["recipe"].get("reduce_range", False))
    layers = layers_of(graph_of(artifact), narrow=narrow)
    return {name: (layer, without_float(layer, reference)) for name, layer in layers.items()}
