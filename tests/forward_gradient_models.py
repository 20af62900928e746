"""Lightning modules for tests of forward gradients; importable by spawned processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_npu.forward_gradient import FixedPoint, ForwardGradient, ForwardGradientMixin
from lightning_npu.hashing import state_digest


def loader(size: int = 64, batch: int = 8, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=batch)


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**settings, **options})


class Plain(pl.LightningModule):
    """Written as for any optimizer."""

    def __init__(self, record: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 2)
        self.record, self.options = record, options
        self.hybrid, self.fixed = bool(options.pop("hybrid", False)), bool(options.pop("fixed", False))
        self.graphs: list[bool] = []
        self.logged: list[str] = []
        if self.hybrid:
            self.body.requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.graphs.append(loss.requires_grad)
        self.log("train", loss, on_epoch=True)
        self.log_dict({"again": loss})
        return loss

    def configure_optimizers(self) -> Any:
        options = {"eps": 1e-2, "estimator": "normalized", **self.options}
        if self.fixed:
            options["fixed_point"] = FixedPoint(8, rounding="error_feedback")
        if self.hybrid:
            first_order = torch.optim.Adam(self.head.parameters(), lr=0.01)
            optimizer = ForwardGradient(self.body.parameters(), 0.02, first_order=first_order, **options)
        else:
            optimizer = ForwardGradient(self.parameters(), 0.02, **options)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}

    def on_train_end(self) -> None:
        if self.record:
            optimizer = self.optimizers(use_pl_optimizer=False)
            facts = {
                "weights": state_digest(self),
                "steps": self.trainer.global_step,
                "calls": optimizer.calls,
                "graphs": sorted(set(self.graphs)),
                "grads": any(p.grad is not None for p in self.body.parameters()),
                "lr": optimizer.param_groups[0]["lr"],
                "loss": float(self.trainer.callback_metrics.get("train_loss_ff", -1)),
            }
            Path(f"{self.record}.{self.global_rank}").write_text(json.dumps(facts))


class Mixed(ForwardGradientMixin, Plain):
    """The same with the mixin, whose training_step comes from a base class that does not know it."""

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        if not self._quiet:
            self.logged.append(name)
        super().log(name, *args, **kwargs)

    def teardown(self, stage: str) -> None:
        """Lightning leaves the group to the exit of spawned processes, where gloo's threads abort now and then."""
        super().teardown(stage)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
