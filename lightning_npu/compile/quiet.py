"""Keeps from the user what torch's exporter says to its own developers."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

_LOGGERS = (
    "torch.onnx._internal.exporter._registration",
    "torch.fx.experimental.symbolic_shapes",
    "onnx_ir.passes.common.initializer_deduplication",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the block notes about optional packages, deprecations inside torch and dumps of graphs are not shown.

    What the module's own code writes to stderr is shown at the end, unless an error leaves the block: torch then prints
    the whole graph there, and the error says what matters of it.
    """
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    written = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(written):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            # the weights of an nn.LSTM, which it sets anew whenever it is moved
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
            yield
        sys.stderr.write(written.getvalue())
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
