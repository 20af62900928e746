"""The other process of a check: opens a share of the device, computes, and prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from lightning_npu.errors import NPUError
from lightning_npu.runtimes.mobilint import library
from lightning_npu.verify_mobilint.bench import Bench, digest, images, rate


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What was asked for: "numbers" (devices that are seen), or "run" (compute on some units)."""
    module = library.load()
    if request["do"] == "numbers":
        return {"numbers": library.device_numbers(module)}
    bench = Bench(module, Path(request["path"]), request["number"], request["seconds"], request["mode"])
    with bench.launched(request["units"]) as model:
        samples = images(model, 4)
        if request.get("start_s"):
            time.sleep(max(0.0, request["start_s"] - time.time()))
        outputs = [list(model.infer_hwc(sample)) for sample in samples]
        threads = len(request["units"] or bench.plan().units)
        per_second, wrong = rate(model, samples, threads, bench.seconds)
        return {"digest": digest(outputs), "rate": per_second, "wrong": wrong}


def main() -> None:
    """Answer the request on the command line."""
    try:
        found = answer(json.loads(sys.argv[1]))
    except NPUError as error:
        found = {"error": " ".join(str(error).split())}
    except Exception as error:  # what the vendor raised is what the parent wants to know
        found = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
