"""Lightning, as whichever of its two packages the user's script has imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    import pytorch_lightning as pl  # callbacks of one package are no callbacks of the other
else:
    try:
        import lightning.pytorch as pl
    except ImportError:
        try:
            import pytorch_lightning as pl
        except ImportError as error:
            raise ImportError("lightning_npu's callbacks need PyTorch Lightning: pip install lightning") from error

__all__ = ["pl"]
