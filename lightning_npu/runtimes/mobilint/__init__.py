"""Mobilint ARIES boards through the vendor's ``qbruntime``, which is imported when a device is opened."""


def __getattr__(name: str) -> object:
    if name == "MobilintRuntime":  # it needs torch, what looks for boards does not
        from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime

        return MobilintRuntime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
