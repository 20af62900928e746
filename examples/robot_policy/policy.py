"""The networks: a visual encoder that can be frozen, and an action expert that reads its keys and values.

In the manner of the AR-Actor: ResNet18 and Transformer encoder layers look at the image alone; layer i of the action
expert attends to the keys and values that encoder layer i made, and the expert never sends a gradient back. So the
encoder is one graph with the image as its only input and ``(K1, V1, .., K4, V4)`` as its outputs, and it can be cut
after the ResNet18 (``"stem"``: L0) or after any of its layers (``"layers.0"``: L1, and so on).

Sizes are an eighth of the paper's, so that a CPU trains it in minutes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 128
HEADS = 4
FEED_FORWARD = 512
LAYERS = 4
CHUNK = 16
"""Actions predicted at once."""


class BasicBlock(nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Stem(nn.Module):
    """ResNet18 (narrow, the last stage without its stride) and a 1x1 convolution: image to tokens."""

    def __init__(self, channels: int = 16, width: int = WIDTH) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inputs = channels
        for outputs, stride in ((channels, 1), (2 * channels, 2), (4 * channels, 2), (8 * channels, 1)):
            blocks += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.project = nn.Conv2d(inputs, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 3, 96, 96) to tokens (batch, 36, width)."""
        x = self.pool(F.relu(self.norm(self.conv(images))))
        return self.project(self.blocks(x)).flatten(2).transpose(1, 2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


class EncoderLayer(nn.Module):
    """A pre-norm Transformer layer that also hands out its keys and values.

    Attention is written as two matrix products and a softmax, with separate projections: what every INT8 quantiser and
    NPU compiler understands.

    Args:
        updates_tokens: False for the last layer. Nothing reads the tokens after it, so it has keys and values only.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS, updates_tokens: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.updates_tokens = updates_tokens
        self.norm1 = nn.LayerNorm(width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        if updates_tokens:
            self.query = nn.Linear(width, width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.norm2 = nn.LayerNorm(width)
            self.expand = nn.Linear(width, FEED_FORWARD)
            self.contract = nn.Linear(FEED_FORWARD, width)

    def forward(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new tokens, the keys and the values, all (batch, tokens, width)."""
        x = self.norm1(tokens)
        located = x + position
        key, value = self.key(located), self.value(x)
        if not self.updates_tokens:
            return tokens, key, value
        q, k, v = (split_heads(t, self.heads) for t in (self.query(located), key, value))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        tokens = tokens + self.out((weights @ v).transpose(1, 2).flatten(2))
        return tokens + self.contract(F.relu(self.expand(self.norm2(tokens)))), key, value


def sine_position(rows: int, columns: int, width: int) -> Tensor:
    """The 2-D sine-cosine position embedding, (1, rows * columns, width): half the channels for y, half for x."""
    half = width // 2
    frequency = 10000 ** (2 * (torch.arange(half) // 2) / half)
    y, x = torch.meshgrid(torch.arange(1, rows + 1) / rows, torch.arange(1, columns + 1) / columns, indexing="ij")

    def wave(place: Tensor) -> Tensor:
        angle = 2 * math.pi * place[..., None] / frequency
        return torch.stack([angle[..., 0::2].sin(), angle[..., 1::2].cos()], -1).flatten(-2)

    return torch.cat([wave(y), wave(x)], -1).reshape(1, rows * columns, width)


class VisualEncoder(nn.Module):
    """ResNet18, a 1x1 convolution and four Transformer encoder layers; 1.4 million parameters."""

    position: Tensor

    def __init__(self, channels: int = 16, width: int = WIDTH, image_size: int = 96) -> None:
        super().__init__()
        self.stem = Stem(channels, width)
        self.layers = nn.ModuleList(EncoderLayer(width, updates_tokens=i < LAYERS - 1) for i in range(LAYERS))
        grid = image_size // 16
        self.register_buffer("position", sine_position(grid, grid, width), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map normalised images (batch, 3, 96, 96), float, to (K1, V1, .., K4, V4), each (batch, 36, width)."""
        tokens = self.stem(images)
        outputs: list[Tensor] = []
        for layer in self.layers:
            tokens, key, value = layer(tokens, self.position)
            outputs += [key, value]
        return tuple(outputs)


class ExpertLayer(nn.Module):
    """A pre-norm Transformer layer whose tokens attend to given keys and values and to themselves."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, FEED_FORWARD), nn.ReLU(), nn.Linear(FEED_FORWARD, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map x (batch, tokens, width), with the encoder's key and value (batch, 36, width), to x's shape."""
        q, k, v = self.query_key_value(self.norm1(x)).chunk(3, -1)
        q, k, v = (split_heads(t, self.heads) for t in (q, torch.cat([key, k], 1), torch.cat([value, v], 1)))
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.feed_forward(self.norm2(x))


class ActionExpert(nn.Module):
    """Predicts the next 16 actions from the robot's state and the encoder's keys and values; 0.8 million parameters."""

    def __init__(self, state_size: int = 4, action_size: int = 4, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.state = nn.Linear(state_size, width)
        self.slots = nn.Parameter(torch.randn(1, 1 + CHUNK, width) * 0.02)
        self.layers = nn.ModuleList(ExpertLayer(width, dropout=dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.action = nn.Linear(width, action_size)

    def forward(self, features: tuple[Tensor, ...], state: Tensor) -> Tensor:
        """Map (K1, V1, .., K4, V4) and the normalised state (batch, 4) to actions (batch, 16, 4)."""
        x = self.state(state)[:, None] + self.slots
        for layer, key, value in zip(self.layers, features[0::2], features[1::2], strict=True):
            x = layer(x, key, value)
        return self.action(self.norm(x[:, 1:]))
