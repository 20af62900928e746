"""From ``nn.Module`` and calibration data to an artifact: capture, split, export, quantize, judge."""

from lightning_npu.compile.pipeline import compile_module as compile_module
