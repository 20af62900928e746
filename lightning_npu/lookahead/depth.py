"""How far to look ahead."""

from __future__ import annotations

from lightning_npu.errors import InputError


class Depth:
    """How many batches to ask for ahead: a number, or "auto".

    "auto" starts at 2. If within 16 batches the training waited for the device *and* the device waited for the
    training, a longer queue would have spared both, and it grows by one. It never exceeds ``most``, nor what fits into
    ``memory_bytes``: each batch ahead holds its own tensors and its features.

    Args:
        depth: "auto" or a number of batches from 0 on.
        most: the largest depth that "auto" takes.
        memory_bytes: what the batches ahead may hold in all under "auto"; default 1 GiB.
    """

    def __init__(self, depth: int | str = "auto", *, most: int = 8, memory_bytes: int = 1 << 30) -> None:
        if depth != "auto" and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
            raise InputError("depth is wrong.", expected="'auto', or a number of batches from 0 on", got=repr(depth))
        self.auto = depth == "auto"
        self.value = 2 if isinstance(depth, str) else depth
        self.most, self.memory_bytes = most, memory_bytes
        self._batches, self._wait_s, self._idle_s, self._since = 0, 0.0, 0.0, 0.0

    def bound(self, batch_bytes: int) -> None:
        """Keep "auto" within its memory, for batches of this size (tensors and features)."""
        if self.auto:
            self.value = max(1, min(self.value, self.memory_bytes // max(1, batch_bytes)))
            self.most = max(1, min(self.most, self.memory_bytes // max(1, batch_bytes)))

    def step(self, wait_s: float, idle_s: float, now: float) -> None:
        """One batch was used.

        Args:
            wait_s: seconds that training has waited for features so far.
            idle_s: seconds that the devices have waited for work so far.
            now: monotonic time in seconds.
        """
        if not self.auto:
            return
        self._batches += 1
        if self._batches % 16 == 1:
            self._wait_s, self._idle_s, self._since = wait_s, idle_s, now
        elif self._batches % 16 == 0 and self.value < self.most:
            least = 0.005 * (now - self._since)
            if wait_s - self._wait_s > least and idle_s - self._idle_s > least:
                self.value += 1
