"""The front of an ACT policy, laid out as LeRobot's ``modeling_act.ACT`` lays it out, without depending on LeRobot.

Tokens are [latent, robot state, image features ..] in sequence-first order, taken apart and stacked one by one; learned
positions for the first two and sine-cosine positions for the image are added to queries and keys only; the layers hold
``nn.MultiheadAttention`` and are pre- or post-norm. Names of parameters are LeRobot's, so that weights fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class ACTConfig:
    dim_model: int = 32
    n_heads: int = 4
    dim_feedforward: int = 64
    n_encoder_layers: int = 2
    latent_dim: int = 8
    state_dim: int = 6
    pre_norm: bool = False
    feedforward_activation: str = "relu"
    dropout: float = 0.1


class Backbone(nn.Module):
    """Stands for ResNet18 up to layer4: (B, 3, H, W) -> (B, 24, H / 8, W / 8)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels_in, channels in ((3, 8), (8, 16), (16, 24)):
            layers += [nn.Conv2d(channels_in, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"feature_map": self.layers(x)}


class SinusoidalPositionEmbedding2d(nn.Module):
    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dimension = dimension

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (1, 2 * dimension, H, W); computed from the feature map's size in every call."""
        ones = torch.ones_like(x[0, :1])
        rows, columns = ones.cumsum(1, dtype=torch.float32), ones.cumsum(2, dtype=torch.float32)
        rows = rows / (rows[:, -1:, :] + 1e-6) * 2 * math.pi
        columns = columns / (columns[:, :, -1:] + 1e-6) * 2 * math.pi
        frequency = 10000 ** (2 * (torch.arange(self.dimension, dtype=torch.float32) // 2) / self.dimension)
        columns, rows = columns.unsqueeze(-1) / frequency, rows.unsqueeze(-1) / frequency
        parts = [
            torch.stack((angle[..., 0::2].sin(), angle[..., 1::2].cos()), dim=-1).flatten(3)
            for angle in (rows, columns)
        ]
        return torch.cat(parts, dim=3).permute(0, 3, 1, 2)


class ACTEncoderLayer(nn.Module):
    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(config.dim_model, config.n_heads, dropout=config.dropout)
        self.linear1 = nn.Linear(config.dim_model, config.dim_feedforward)
        self.dropout = nn.Dropout(config.dropout)
        self.linear2 = nn.Linear(config.dim_feedforward, config.dim_model)
        self.norm1, self.norm2 = nn.LayerNorm(config.dim_model), nn.LayerNorm(config.dim_model)
        self.dropout1, self.dropout2 = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.activation = {"relu": F.relu, "gelu": F.gelu}[config.feedforward_activation]
        self.pre_norm = config.pre_norm

    def forward(self, x: Tensor, pos_embed: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        skip = x
        if self.pre_norm:
            x = self.norm1(x)
        q = k = x if pos_embed is None else x + pos_embed
        x = skip + self.dropout1(self.self_attn(q, k, value=x, key_padding_mask=key_padding_mask)[0])
        if not self.pre_norm:
            x = self.norm1(x)
        skip = x
        if self.pre_norm:
            x = self.norm2(x)
        x = skip + self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return x if self.pre_norm else self.norm2(x)


class ACTEncoder(nn.Module):
    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ACTEncoderLayer(config) for _ in range(config.n_encoder_layers))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(self, x: Tensor, pos_embed: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """(S, B, C), (S, 1, C) -> (S, B, C)."""
        for layer in self.layers:
            x = layer(x, pos_embed=pos_embed, key_padding_mask=key_padding_mask)
        return self.norm(x)


class ACTFront(nn.Module):
    """Backbone, projections, positions and encoder of an ACT policy with a robot state and any number of cameras."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.encoder = ACTEncoder(config)
        self.encoder_robot_state_input_proj = nn.Linear(config.state_dim, config.dim_model)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, config.dim_model)
        self.encoder_img_feat_input_proj = nn.Conv2d(24, config.dim_model, kernel_size=1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(2, config.dim_model)
        self.encoder_cam_feat_pos_embed = SinusoidalPositionEmbedding2d(config.dim_model // 2)

    def forward(self, images: Tensor, latent: Tensor, state: Tensor) -> Tensor:
        """(B, 3, H, W), (B, latent_dim), (B, state_dim) -> (2 + H / 8 * W / 8, B, C)."""
        tokens = [self.encoder_latent_input_proj(latent)]
        positions = list(self.encoder_1d_feature_pos_embed.weight.unsqueeze(1))
        tokens.append(self.encoder_robot_state_input_proj(state))
        features = self.backbone(images)["feature_map"]
        position = self.encoder_cam_feat_pos_embed(features).to(dtype=features.dtype)
        features = self.encoder_img_feat_input_proj(features)
        tokens.extend(features.flatten(2).permute(2, 0, 1))  # einops' "b c h w -> (h w) b c"
        positions.extend(position.flatten(2).permute(2, 0, 1))
        return self.encoder(torch.stack(tokens, dim=0), pos_embed=torch.stack(positions, dim=0))


def act_front(seed: int = 0, **changes: object) -> ACTFront:
    """A front with weights that are not degenerate: batch statistics and biases differ from their defaults."""
    torch.manual_seed(seed)
    model = ACTFront(ACTConfig(**changes))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0 if parameter.mean() > 0.5 else 0.0, std=0.1)
    model.train()(
        torch.rand(4, 3, 32, 32),
        torch.randn(4, model.encoder_latent_input_proj.in_features),
        torch.randn(4, model.encoder_robot_state_input_proj.in_features),
    )
    return model.eval().requires_grad_(False)
