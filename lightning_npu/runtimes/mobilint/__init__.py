"""Mobilint ARIES boards through the vendor's ``qbruntime``, which is imported when a device is opened."""

from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime as MobilintRuntime
