"""Stub driver libraries, written in C, under the real ``pynvml`` and ``mbltml``.

The real binding runs, over a library that answers from a power trace which is known exactly: a square wave, sine,
random telegraph signal or constant, as a function of CLOCK_MONOTONIC, which is Python's ``time.monotonic()``. Sensors
look at it the way real ones do (update period, averaging window, counter that sees part of the time, noise), and
faults can be switched at run time, in every process that has the library loaded::

    with StubNvml([StubBoard(Load("square", 50, 180, 1.0), "a100"), StubBoard(sensors="pascal")]) as nvml:
        import pynvml                                # the real one

        pynvml.nvmlInit()
        ...
        nvml.fault(0, "counter_reset", after_s=2.0)              # from then on it counts from 0
        nvml.fault(0, "power_error", 999, after_s=0, for_s=2)    # NVML code 999 for two seconds
        nvml.fault(1, "lost", 15)                                # GPU_IS_LOST from now on
        nvml.clear(1)
        nvml.truth_j(0, t0, t1)                                  # joules, in Python, not asked of the C code

    with StubMbltml([StubBoard(NPU_LOAD, "npu")]) as mbltml: ...              # the form that is installed
    with StubMbltml([...], form="0.0.0", binding=folder) as mbltml: ...       # another one, from a folder

While a stub is entered, this process and its children find it: pynvml by a preloaded library (children by
LD_LIBRARY_PATH), mbltml by the folder of its ``__file__`` (children by a ``sitecustomize`` on PYTHONPATH; so not with
``python -I``, ``-E`` or ``-S``). ``os.environ`` is set meanwhile; ``stub.env`` is what was set, for a subprocess with
an environment of its own. The bindings' state is put back on leaving: sources must be closed before.

Faults (``value``): power_error, counter_error, other_error, lost (status code); counter_reset (joules it starts from),
counter_freeze, counter_add (joules too much), counter_wrap (modulo, joules), power_value (watts that it reads),
power_freeze, slow (seconds per reading). ``init_error`` fails the library's start (NVML 9: driver not loaded, 4: no
permission; mbltml 1: no driver), ``call_s`` slows every reading of every board. ``span`` replaces the load for a while.
``calls`` counts calls. ``no_nvml_library()`` is a machine without libnvidia-ml.so.1.

mbltml comes in two incompatible forms of one name: 0.0.0 (``fn(dev_no)``) and mobilint-ml 1.4/1.5 (``fn(type,
dev_no)``). Only one can be installed; the other is looked for in the folder ``<sys.prefix>/mbltml-<form>``, made by
``pip install --no-deps --target <folder> mbltml==0.0.0``.
"""

from __future__ import annotations

from .boards import ARIES_RB, NPU_LOAD, SENSORS, Load, Part, Sensors, StubBoard, load_j
from .build import compiler, library
from .library import BindingMissing, Stub, StubMbltml, StubNvml, no_nvml_library

__all__ = [
    "ARIES_RB",
    "NPU_LOAD",
    "SENSORS",
    "BindingMissing",
    "Load",
    "Part",
    "Sensors",
    "Stub",
    "StubBoard",
    "StubMbltml",
    "StubNvml",
    "compiler",
    "library",
    "load_j",
    "no_nvml_library",
]
