"""What a look-ahead counts: how calls of frozen modules were answered, and how long training waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counters of a look-ahead.

    Attributes:
        hits: calls answered from a request.
        balanced: calls answered by the FP32 head in torch (see ``balance``).
        misses: calls computed on the spot, by cause: "learning" (the call that taught a route), "not_a_batch_leaf",
            "edited", "asked_twice", "beyond_reach" (known, but not requested for this batch), "differs" (``inputs``
            gave something else than what was passed), "inputs_failed", "calibration" (see :meth:`Ahead.calibrate`),
            "requires_grad" (what comes before the module is trained, so its input is not known ahead).
        wait_s: seconds that calls waited for requested features.
        queue_depth: batches that were asked for and not used yet, when the last batch was delivered.
    """

    hits: int = 0
    balanced: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    wait_s: float = 0.0
    queue_depth: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over calls of the device; 0 before the first."""
        calls = self.hits + sum(self.misses.values())
        return self.hits / calls if calls else 0.0
