"""Behaviour cloning as a LightningModule; with a frozen encoder it trains the action expert alone."""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from numpy.typing import NDArray
from torch import Tensor, nn

from data import normalise
from policy import ActionExpert


class BehaviourCloning(L.LightningModule):
    """A visual encoder and an action expert that imitates demonstrations.

    Args:
        encoder: images to (K1, V1, .., K4, V4).
        state_mean: (4,), of the demonstrations.
        state_std: (4,).
        freeze_encoder: train the expert only: the encoder's parameters get no gradient and its batch norms stay put.
        learning_rate: the peak of a one-cycle schedule over the trainer's ``max_steps``.
    """

    state_mean: Tensor
    state_std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        state_mean: NDArray[np.float32],
        state_std: NDArray[np.float32],
        *,
        freeze_encoder: bool,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.expert = ActionExpert()
        self.freeze_encoder = freeze_encoder
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.register_buffer("state_mean", torch.as_tensor(state_mean))
        self.register_buffer("state_std", torch.as_tensor(state_std))
        if freeze_encoder:
            self.encoder.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> BehaviourCloning:
        """As for any module, but a frozen encoder stays in eval mode."""
        super().train(mode)
        if self.freeze_encoder:
            self.encoder.eval()
        return self

    def forward(self, images: Tensor, state: Tensor) -> Tensor:
        """Map normalised images (batch, 3, 96, 96) and raw states (batch, 4) to actions (batch, 16, 4)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_encoder):
            features = self.encoder(images)
        return self.expert(features, (state - self.state_mean) / self.state_std)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        """Mean absolute error over the actions within the episode."""
        error = (self(batch["images"], batch["state"]) - batch["actions"]).abs()
        loss = (error * batch["valid"][..., None]).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, one cycle."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, self.learning_rate, weight_decay=self.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def act(self, image: NDArray[np.uint8], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """The next 16 actions, (16, 4), for one camera image (96, 96, 3) and robot state (4,)."""
        images = normalise(image.transpose(2, 0, 1)[None].copy())
        return self(images, torch.from_numpy(state)[None])[0].numpy()
