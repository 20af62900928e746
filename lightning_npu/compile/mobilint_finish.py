"""From the vendor's MXQ to an artifact: what was built is looked at, and its fidelity measured on the board."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_npu.artifact import Artifact, OutputFidelity, new_folder, write_manifest
from lightning_npu.compile.mobilint_kit import Kit, read_kit
from lightning_npu.compile.mobilint_options import precision_of
from lightning_npu.errors import CompileError, FidelityError, RuntimeUnavailableError
from lightning_npu.manifest import sha256_file
from lightning_npu.runtimes.cpu import instruction_set
from lightning_npu.tensor_spec import TensorSpec

UNMEASURED = "unmeasured"
_FILES = {"model": "model.onnx", "reference": "reference.onnx", "probe": "probe.npz"}
_BATCH = 8


def finish(
    mxq: str | Path,
    output: str | Path,
    *,
    fidelity: bool | None = None,
    overwrite: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Artifact:
    """Make an artifact of a kit and the MXQ that its compile.py wrote.

    The samples of the kit that judge are run through the board and through the FP32 reference. The artifact also holds
    the ONNX models of the kit, so that it runs where there is no board.

    Args:
        mxq: the MXQ in its kit, KIT/model.mxq, with the record that compile.py wrote beside it.
        output: path of the artifact folder.
        fidelity: whether it must be measured now; False makes an artifact that says "unmeasured" and is measured when
            a board first opens it. None: as the kit was written.
        overwrite: replace an artifact that is at ``output``.
        source: further entries for the manifest's ``source``.

    Raises:
        CompileError: the kit or the record is missing, damaged, or of another MXQ.
        ArtifactError: the file is no MXQ, or is not what the kit describes; or ``output`` exists.
        RuntimeUnavailableError: there is no board to measure with.
        FidelityError: an output is too far from FP32.
    """
    mxq, output = Path(mxq), Path(output)
    kit = read_kit(mxq.resolve().parent)
    record = _record(mxq, kit)
    measured = bool(kit.content["fidelity_required"]) if fidelity is None else fidelity
    with new_folder(output, overwrite=overwrite) as folder:
        for role, name in _FILES.items():
            if role in kit.artifact.manifest["files"]:
                shutil.copyfile(kit.artifact.file(role), folder / name)
        shutil.copyfile(mxq, folder / "model.mxq")
        roles = {role: name for role, name in _FILES.items() if (folder / name).is_file()}
        content = _content(kit, record, source or {})
        content["fidelity"] = _unmeasured(kit)
        write_manifest(folder, content, {**roles, "mxq": "model.mxq"})
        if measured:
            content["fidelity"] = _measured(kit, folder, content["precision"], mxq)
            write_manifest(folder, content, {**roles, "mxq": "model.mxq"})
    return Artifact.load(output)


def _record(mxq: Path, kit: Kit) -> dict[str, Any]:
    """What compile.py wrote of this very MXQ.

    Raises:
        CompileError: there is none, or it is of another file or kit: then nobody knows with which bits it was built.
    """
    from lightning_npu.runtimes.mobilint.mxq import check_mxq

    check_mxq(mxq)
    path = Path(f"{mxq}.json")
    remedy = f"compile it with the kit's own script, python {kit.path / 'compile.py'}, which writes both"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = {key: record[key] for key in ("mxq_sha256", "kit_sha256")}
        compiler = {key: str(record["compiler"][key]) for key in ("name", "version", "target_device")}
        bits = {key: record["bits"][key] for key in ("activation", "weight", "score_layers")}
        core_mode = str(record["core_mode"])
    except FileNotFoundError:
        raise CompileError(
            f"There is no record of how {mxq.name} was built.",
            expected=f"{path.name} beside it: bits and compiler are known from nowhere else",
            remedy=remedy,
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompileError(f"{path} is damaged: {error!r}.", remedy=remedy) from error
    expected = {"mxq_sha256": sha256_file(mxq), "kit_sha256": kit.content["kit_sha256"]}
    if found != expected:
        which = "another MXQ" if found["mxq_sha256"] != expected["mxq_sha256"] else "another kit"
        raise CompileError(f"{path.name} is the record of {which}.", expected=expected, got=found, remedy=remedy)
    return {"compiler": compiler, "bits": bits, "core_mode": core_mode, "seconds": record.get("seconds")}


def _content(kit: Kit, record: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest without files, fidelity and what is derived."""
    manifest, head = kit.artifact.manifest, kit.content["head"]
    attentions = int(kit.content["model"]["attentions"])
    compiler = record["compiler"]
    return {
        "target": "mobilint",
        "precision": precision_of(record["bits"], attentions),
        "recipe": {
            "name": "mobilint",
            "calibration": dict(kit.content["compile"]["calibration"]),
            "uint8": kit.content["compile"]["uint8"],
            "attentions": attentions,
            "export": {"opset": kit.content["model"]["opset"], "max_abs_error": kit.content["model"]["max_abs_error"]},
            "kit_sha256": kit.content["kit_sha256"],
            "onnx": dict(manifest["recipe"]),  # of the model that runs where there is no board
        },
        "inputs": [
            {**spec, "layout": layout} for spec, layout in zip(manifest["inputs"], head["layouts"], strict=True)
        ],
        "outputs": list(manifest["outputs"]),
        "signature": manifest["signature"],
        "structure": manifest["structure"],
        "source": {**manifest["source"], **source},
        "calibration": dict(manifest["calibration"]),
        "mobilint": {
            "file": "model.mxq",
            "core_mode": record["core_mode"],
            "compiler": compiler,
            "bits": record["bits"],
            "inputs": [{key: entry[key] for key in ("layout", "dtype", "shape")} for entry in head["inputs"]],
            "outputs": [{key: entry[key] for key in ("shape", "dtype")} for entry in head["outputs"]],
        },
        "tools": {**manifest["tools"], compiler["name"]: compiler["version"]},
    }


def _unmeasured(kit: Kit) -> dict[str, Any]:
    least = kit.artifact.manifest["fidelity"]["min_sqnr_db"]
    return {"runtime": UNMEASURED, "instruction_set": UNMEASURED, "min_sqnr_db": least, "outputs": {}}


def _measured(kit: Kit, folder: Path, precision: str, mxq: Path) -> dict[str, Any]:
    """Fidelity through the board, against the FP32 reference.

    Raises:
        RuntimeUnavailableError: no board answers.
        FidelityError: an output is too far from FP32.
    """
    from lightning_npu.compile.fidelity import check, measure
    from lightning_npu.runtimes.base import open_runtime
    from lightning_npu.runtimes.onnx import OnnxRuntime

    artifact = Artifact.load(folder)
    try:
        board = open_runtime(artifact, "mobilint")
    except RuntimeUnavailableError as error:
        raise RuntimeUnavailableError(
            f"Fidelity cannot be measured here: {error.what}",
            expected="the board that the MXQ is for",
            got=error.got,
            remedy=f"copy the kit with {mxq.name} and {mxq.name}.json to the machine with the board and finish it "
            "there; or pass --no-fidelity (fidelity=False) for an artifact that says 'unmeasured' and is measured when "
            f"a board first opens it. {error.remedy or ''}".rstrip(),
        ) from error
    try:
        reference = OnnxRuntime.open_reference(artifact)
        try:
            found = measure(reference, board, _batches(kit, artifact.inputs))
        finally:
            reference.close()
    finally:
        board.close()
    least = artifact.manifest["fidelity"]["min_sqnr_db"]
    if least is not None:
        _check(check, found, least, kit, precision)
    return {
        "runtime": "mobilint",
        "instruction_set": instruction_set(),
        "min_sqnr_db": least,
        "outputs": {name: figures.to_json() for name, figures in found.items()},
    }


def _check(check: Any, found: Mapping[str, OutputFidelity], least: float, kit: Kit, precision: str) -> None:
    """Refuse what is not faithful, with the remedies that this compiler has, in order."""
    try:
        check(found, min_sqnr_db=least, recipe="mobilint", precision=precision)
    except FidelityError as error:
        compiled = kit.content["compile"]
        remedies = ["calibrate on more and more varied inputs, preprocessed as in use"]
        if kit.content["model"]["attentions"] and compiled["score_bits"] == 8:
            remedies.append("target_options={'score_bits': 16}: attention is what 8 bits lose first")
        if kit.content["model"]["attentions"] and compiled["bits"]["activation"]["ffn"] == 8:
            remedies.append("precision='a16w8': 16 bits for what the Transformer layers give")
        remedies += ["cut elsewhere", "lower min_sqnr_db, if the policy succeeds as often as without"]
        raise FidelityError(
            error.what, expected=error.expected, got=error.got, remedy="; or ".join(remedies)
        ) from error


def _batches(kit: Kit, specs: Sequence[TensorSpec]) -> Iterator[list[Tensor]]:
    """The samples that judge, as the artifact takes them."""
    fixed = next((spec.static_batch for spec in specs if spec.static_batch is not None), None)
    size = fixed or _BATCH
    with np.load(kit.judging, allow_pickle=False) as arrays:
        tensors = [torch.from_numpy(arrays[spec.name]) for spec in specs]
    count = int(kit.content["judging"]["count"])
    for start in range(0, count, size):
        stop = min(start + size, count)
        index = torch.arange(start, start + size if fixed else stop).clamp_max(count - 1)
        yield [
            tensor if spec.batch_axis is None else tensor.index_select(spec.batch_axis, index)
            for spec, tensor in zip(specs, tensors, strict=True)
        ]
