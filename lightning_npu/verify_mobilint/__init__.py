"""``python -m lightning_npu.verify_mobilint``: checks on a real board what could not be checked without one."""
