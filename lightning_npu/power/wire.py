"""How readings travel from the helper process to this one: records of one size, and texts when they change."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from lightning_npu.power.base import Reading

# kind, flags, board, length of the text that follows, time, power, energy
RECORD = struct.Struct("<BBHH2xddd")
READING, TEXT, BEAT = range(3)
HELPER = 0xFFFF  # a text about the helper itself, not about a board
LONGEST_TEXT = 1000  # bytes; a frame stays below PIPE_BUF, so that it is written whole or not at all
_POWER, _ENERGY, _LOST, _PROBLEM = 1, 2, 4, 8


def beat(time_s: float) -> bytes:
    """A frame that says that the helper is alive."""
    return RECORD.pack(BEAT, 0, 0, 0, time_s, 0.0, 0.0)


def text(board: int, words: str) -> bytes:
    """A frame that carries what is wrong with a board, or with the helper."""
    encoded = words.encode()[:LONGEST_TEXT]
    return RECORD.pack(TEXT, 0, board, len(encoded), 0.0, 0.0, 0.0) + encoded


class Encoder:
    """Readings to frames. A problem is sent once, when its words change."""

    def __init__(self) -> None:
        self._problems: dict[int, str] = {}

    def encode(self, board: int, reading: Reading) -> Iterator[bytes]:
        """The frames of one reading."""
        if reading.problem and self._problems.get(board) != reading.problem:
            self._problems[board] = reading.problem
            yield text(board, reading.problem)
        flags = _POWER * (reading.power_w is not None) | _ENERGY * (reading.energy_j is not None)
        flags |= _LOST * reading.lost | _PROBLEM * bool(reading.problem)
        power, energy = reading.power_w or 0.0, reading.energy_j or 0.0
        yield RECORD.pack(READING, flags, board, 0, reading.time_s, power, energy)


class Decoder:
    """Frames to readings, however the pipe cuts them."""

    def __init__(self) -> None:
        self._rest = b""
        self._problems: dict[int, str] = {}
        self.newest_s = 0.0
        """Time of the newest reading or sign of life, in ``time.monotonic()``."""
        self.complaint = ""
        """What the helper last said about itself."""

    def decode(self, chunk: bytes) -> Iterator[tuple[int, Reading]]:
        """The readings that ``chunk`` completes, with their boards' positions."""
        buffer, position = self._rest + chunk, 0
        while len(buffer) - position >= RECORD.size:
            kind, flags, board, length, time_s, power, energy = RECORD.unpack_from(buffer, position)
            if len(buffer) - position < RECORD.size + length:
                break
            position += RECORD.size
            words = buffer[position : position + length].decode(errors="replace")
            position += length
            self.newest_s = max(self.newest_s, time_s)
            if kind == READING:
                yield (
                    board,
                    Reading(
                        time_s,
                        power if flags & _POWER else None,
                        energy if flags & _ENERGY else None,
                        self._problems.get(board, "not said") if flags & _PROBLEM else "",
                        bool(flags & _LOST),
                    ),
                )
            elif kind == TEXT and board == HELPER:
                self.complaint = words
            elif kind == TEXT:
                self._problems[board] = words
        self._rest = buffer[position:]
