"""Points ``mbltml`` of a subprocess at a stub library: the binding looks for its library beside its own file."""

import os

_folder = os.environ.get("LIGHTNING_NPU_STUB_MBLTML_FOLDER")
if _folder:
    try:
        import mbltml.mbltml as _binding
    except ImportError:
        pass
    else:
        _binding.__file__ = os.path.join(_folder, "mbltml.py")  # noqa: PTH118
