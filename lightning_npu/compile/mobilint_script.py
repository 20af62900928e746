#!/usr/bin/env python3
"""Compiles this kit with Mobilint's compiler: ``python compile.py``, where qbcompiler is installed.

Needs no package but the compiler's. Writes model.mxq, and beside it model.mxq.json, which says how it was made.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = ("qbcompiler", "qubee")
KIT = Path(__file__).resolve().parent
# what an MXQ would be wrong without; a compiler that does not know one of these must not be called
_NEEDED = ("model", "calib_data_path", "save_path")
_SHAPE_ONLY = {"MultiplyConstant", "DivConstant", "AddingConstant", "Adding", "SubConstant", "Requantize", "Reshape"}
_SHAPE_ONLY |= {"Transpose", "HeaderView", "Identity", "Cast", "Unsqueeze"}


class KitError(Exception):
    """Something is missing or wrong; the text says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Check the kit, call the compiler, keep what it made; gives the exit status."""
    parser = argparse.ArgumentParser(description="Compile this kit with Mobilint's compiler.")
    parser.add_argument("--output", type=Path, default=KIT / "model.mxq", help="default: model.mxq in the kit")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="what the compiler runs on")
    parser.add_argument("--target-device", help="default: aries-rb, or what this version calls the same chip")
    parser.add_argument("--score-layers", help="names of the query-key products, by commas, if they are not found")
    chosen = parser.parse_args(argv)
    try:
        record = compile_kit(chosen.output, chosen.device, chosen.target_device, chosen.score_layers)
    except KitError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {chosen.output} ({record['compiler']['name']} {record['compiler']['version']}).")
    print(f"Next, where the board is: lightning-npu compile --finish {chosen.output} -o encoder.npu")
    return 0


def compile_kit(output: Path, device: str, target: str | None, score_layers: str | None) -> dict[str, Any]:
    """Compile the kit beside this file into ``output``; gives the record that is written beside it."""
    kit = json.loads((KIT / "kit.json").read_text(encoding="utf-8"))
    verify(kit)
    compiler = find_compiler()
    name, version = compiler.__name__, version_of(compiler)
    target = target or target_device(name, version)
    if device == "auto":
        device = "gpu" if _has_gpu() else "cpu"
    output = output.resolve()
    with tempfile.TemporaryDirectory(prefix=".compile.", dir=output.parent) as scratch:
        work = Path(scratch)
        arguments: dict[str, Any] = {
            "model": str(KIT / kit["model"]["file"]),
            "calib_data_path": write_index(kit, work),
            "save_path": str(work / "model.mxq"),
            "backend": "onnx",
            "device": device,
            "target_device": target,
            "inference_scheme": kit["compile"]["core_mode"],
            "config_save_path": str(work / "config.json"),
        }
        layers, pieces = score_products(kit, compiler, arguments, work, score_layers)
        needed = list(_NEEDED)
        if name == "qubee":
            arguments.update(old_options(kit))
        else:
            configs = _understood(lambda: options(kit, compiler, layers), f"{name} {version}")
            arguments.update(configs)
            needed += ["target_device", "inference_scheme", *configs]
        accepted = _accepted(compiler.mxq_compile, arguments, needed, f"{name} {version}")
        begin = time.monotonic()
        compiler.mxq_compile(**accepted)
        made = work / "model.mxq"
        if not made.is_file() or made.stat().st_size == 0:
            raise KitError(f"{name} ended without writing an MXQ file; read what it printed above.")
        config = work / "config.json"
        record = {
            "compiler": {"name": name, "version": version, "target_device": target, "device": device},
            "bits": {**kit["compile"]["bits"], "score_layers": layers},
            "core_mode": kit["compile"]["core_mode"],
            "subgraphs": pieces,
            "arguments": {key: repr(value)[:1000].replace(str(work), ".") for key, value in accepted.items()},
            "used_config": config.read_text(encoding="utf-8")[:200000] if config.is_file() else None,
            "seconds": round(time.monotonic() - begin, 1),
            "kit_sha256": kit["kit_sha256"],
            "mxq_sha256": _sha256(made),
        }
        made.replace(output)
        note = work / "record.json"
        note.write_text(json.dumps(record, indent=1), encoding="utf-8")
        note.replace(f"{output}.json")  # after the MXQ: a record never speaks of a file that is not there
    return record


def verify(kit: dict[str, Any]) -> None:
    """Refuse a kit of which a file is missing or was changed."""
    entries = [kit["model"], *(entry for sample in kit["calibration"]["samples"] for entry in sample)]
    for name, digest in ((entry["file"], entry["sha256"]) for entry in entries):
        path = KIT / name
        if not path.is_file():
            raise KitError(f"{name} is missing from the kit. Copy the kit again.")
        if _sha256(path) != digest:
            raise KitError(f"{name} was changed or damaged since the kit was written. Copy the kit again.")


def write_index(kit: dict[str, Any], work: Path) -> str:
    """List the calibration files in their order, with paths that hold on this machine."""
    paths = [[str(KIT / entry["file"]) for entry in sample] for sample in kit["calibration"]["samples"]]
    names, shapes = zip(*((entry["name"], entry["shape"]) for entry in kit["head"]["inputs"]), strict=True)
    index, text = work / "npy_files.txt", "\n".join(sample[0] for sample in paths) + "\n"
    if len(names) > 1:
        index = work / "npy_files.json"
        text = json.dumps({"info": {"input names": names, "input shapes": shapes}, "calib paths": paths}, indent=1)
    index.write_text(text, encoding="utf-8")
    return str(index)


def find_compiler() -> Any:
    """The vendor's module: qbcompiler, or qubee as it was called before."""
    reasons = []
    for name in MODULES:
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
            continue
        if callable(getattr(found, "mxq_compile", None)):
            return found
        reasons.append(f"{name}: it has no function mxq_compile, so it is another package of this name")
    raise KitError(
        "Mobilint's compiler is not installed here (" + "; ".join(reasons) + "). Run this in the vendor's container; "
        "README.md has the command. The compiler comes from https://dl.mobilint.com or Docker Hub "
        "(mobilint/qbcompiler), not from PyPI: packages of similar names there are something else."
    )


def version_of(module: Any) -> str:
    """The version of the compiler, without a leading "v"."""
    try:
        return importlib.metadata.version(module.__name__)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown")).lstrip("v")


def target_device(name: str, version: str) -> str:
    """What this compiler calls the chip ARIES2: "aries-rb" since 1.2, before "aries2", and "aries" in qubee."""
    if name == "qubee":
        return "aries"
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    return "aries2" if len(numbers) == 2 and numbers < [1, 2] else "aries-rb"


def options(kit: dict[str, Any], compiler: Any, layers: list[str]) -> dict[str, Any]:
    """The configuration objects: calibration, bits per kind of layer, and the preprocessing that is fused."""
    wanted = kit["compile"]
    bits = _config(compiler, "BitConfig")
    transformer = bits.Transformer
    activation = transformer.Activation(**wanted["bits"]["activation"])
    weight = transformer.Weight(**wanted["bits"]["weight"])
    fields: dict[str, Any] = {"transformer": transformer(activation=activation, weight=weight)}
    if layers:
        fields["layer_overrides"] = bits.LayerOverrides(activation_16bits=layers)
    found: dict[str, Any] = {
        "calibration_config": _config(compiler, "CalibrationConfig")(**wanted["calibration"]),
        "bit_config": bits(**fields),
    }
    pixels = wanted["uint8"]
    if pixels is not None:
        inputs = [] if pixels["fused"] else pixels["inputs"]  # none named: all
        found["uint8_input_config"] = _config(compiler, "Uint8InputConfig")(apply=True, inputs=inputs)
        if pixels["pipeline"]:
            found["preprocessing_config"] = _config(compiler, "PreprocessingConfig")(
                apply=True, auto_convert_format=True, pipeline=pixels["pipeline"], input_configs={}
            )
            found["image_channels"] = pixels["channels"]
    return found


def _understood(make: Callable[[], dict[str, Any]], compiler: str) -> dict[str, Any]:
    try:
        return make()
    except (AttributeError, TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        raise KitError(f"The configuration classes of {compiler} are not those of its manual: {error}") from error


def old_options(kit: dict[str, Any]) -> dict[str, Any]:
    """For qubee, which cannot be told bits per layer or take uint8: heads without attention only."""
    if kit["model"]["attentions"] or kit["compile"]["uint8"] is not None:
        raise KitError(
            "qubee cannot be told the bits of a Transformer's layers or to take uint8, so the build would not be what "
            "this kit says. Use qbcompiler 1.1 or newer."
        )
    return {
        "quantize_method": "maxpercentile",
        "is_quant_ch": True,
        "quantize_percentile": kit["compile"]["calibration"]["max_percentile"]["percentile"],
        "quant_output": "channel",
    }


def score_products(
    kit: dict[str, Any], compiler: Any, arguments: dict[str, Any], work: Path, given: str | None
) -> tuple[list[str], int | None]:
    """Where they shall have 16 bits: the query-key products, as the compiler names layers, and its graph's parts."""
    if kit["compile"]["score_bits"] != 16:
        return [], None
    names = sorted({name.strip() for name in (given or "").split(",") if name.strip()})
    pieces = None
    if not names:
        names, pieces = _parsed_products(compiler, arguments, work)
    count = kit["model"]["attentions"]
    if len(names) != count:
        raise KitError(
            f"16-bit scores were asked for: expected {count} query-key products, found {len(names)} {names}. Name "
            "them with --score-layers, as Netron shows them in the .mblt file of qbcompiler.mblt_compile."
        )
    return names, pieces


def _parsed_products(compiler: Any, arguments: dict[str, Any], work: Path) -> tuple[list[str], int]:
    parsed = work / "model.mblt"
    try:
        load = importlib.import_module(f"{compiler.__name__}.model_dict.serialize").load_mblt_model
        shared = {name: arguments[name] for name in ("model", "backend", "target_device")}
        compiler.mblt_compile(mblt_save_path=str(parsed), **shared)
        graph = load(str(parsed))[0]
    except (ImportError, AttributeError) as error:
        raise KitError(
            f"This compiler does not let its graph be read ({error}). Name the query-key products with --score-layers."
        ) from error
    names: list[str] = []
    for part in graph.subgraphs:
        producers = {tensor: layer for layer in part.operators for tensor in getattr(layer, "outputs", [])}
        for softmax in part.operators:
            if _kind(softmax) != "Softmax":
                continue
            waiting = list(softmax.inputs)
            while waiting:
                layer = producers.get(waiting.pop())
                if layer is None:
                    continue
                if _kind(layer) == "MatMul":
                    names.append(layer.name)
                elif _kind(layer) in _SHAPE_ONLY:
                    waiting += list(layer.inputs)
    return sorted(set(names)), len(graph.subgraphs)


def _kind(layer: Any) -> str:
    return str(getattr(layer, "layertype", "")).rsplit(".", 1)[-1]


def _config(compiler: Any, name: str) -> Any:
    """A configuration class, from where this version has it."""
    for place in (compiler.__name__, f"{compiler.__name__}.configs"):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(place), name)
    raise KitError(
        f"{compiler.__name__} {version_of(compiler)} has no {name}, without which the build would not be what this kit "
        "says (by default a Transformer is compiled with 16-bit activations). Use qbcompiler 1.1 or newer."
    )


def _accepted(function: Any, arguments: dict[str, Any], needed: list[str], compiler: str) -> dict[str, Any]:
    """The arguments that the function names; what only ``**kwargs`` takes, the compiler drops without a word."""
    known = set(inspect.signature(function).parameters)
    missing = [name for name in needed if name not in known]
    if missing:
        raise KitError(
            f"mxq_compile of {compiler} does not take {', '.join(missing)}, and would silently build something else. "
            "Use another version of qbcompiler (1.1 to 1.4 are described by the vendor)."
        )
    return {name: value for name, value in arguments.items() if name in known}


def _has_gpu() -> bool:
    with contextlib.suppress(ImportError, AttributeError):
        return bool(importlib.import_module("torch").cuda.is_available())
    return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
