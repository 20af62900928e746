"""Reads a run that W&B wrote offline: ``run-*.wandb``, LevelDB's log framing around protobuf records."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # header of a chunk: 4 bytes of checksum, 2 of length, 1 of type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> list[Any]:
    """All complete records in the file, as far as it is written."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, found = path.read_bytes(), HEADER, b"", []  # the file itself starts with 7 bytes
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:  # the rest of a block is padding
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        chunk = data[position + HEADER : position + HEADER + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(chunk) < length:
            break
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            found.append(Record.FromString(parts))
        position += HEADER + length
    return found


def finished_run(folder: Path, timeout_s: float = 60) -> list[Any]:
    """Records of the only offline run under ``folder``; W&B goes on writing after ``run.finish()`` has returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        files = list(folder.glob("**/run-*.wandb"))
        assert len(files) <= 1, files
        found = records(files[0]) if files else []
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        assert time.monotonic() < deadline, f"W&B has not finished {files}"
        time.sleep(0.02)


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The logged rows, in order."""
    return [dict(_items(record.history.item)) for record in found if record.WhichOneof("record_type") == "history"]


def summary(found: list[Any]) -> dict[str, Any]:
    """The summary at the end."""
    values: dict[str, Any] = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            values.update(_items(record.summary.update))
    return values


def metrics(found: list[Any]) -> dict[str, str]:
    """What was defined: the axis by metric or glob."""
    kinds = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in kinds}


def artifacts(found: list[Any]) -> dict[str, Any]:
    """Logged artifacts by type."""
    return {r.artifact.type: r.artifact for r in found if r.WhichOneof("record_type") == "artifact"}


def _items(items: Any) -> Iterator[tuple[str, Any]]:
    for item in items:
        yield item.key or ".".join(item.nested_key), json.loads(item.value_json)
