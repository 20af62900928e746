"""Keeps from the user what exporters say to their own developers, and their logging habits from the user's logging."""

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
    "onnx_ir",
    "onnxscript",
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


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Within the block nobody configures the root logger by the way.

    The functions ``logging.warning`` and kin do where it has no handler, and ONNX Runtime's quantiser calls them: the
    user's ``logging.basicConfig(...)`` afterwards would do nothing.
    """
    root, stand_in = logging.getLogger(), logging.lastResort
    if root.handlers or stand_in is None:
        yield
        return
    root.addHandler(stand_in)  # what logging itself falls back to where there is no handler
    try:
        yield
    finally:
        root.removeHandler(stand_in)
