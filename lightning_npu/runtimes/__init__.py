"""Runtimes: what executes an artifact. Third parties add theirs by the entry-point group ``lightning_npu.runtimes``."""

from lightning_npu.runtimes.base import Runtime as Runtime
from lightning_npu.runtimes.base import available as available
from lightning_npu.runtimes.base import open_runtime as open_runtime
