"""The visual encoder at the source paper's size: ResNet18, 1x1 projection to 512, k Transformer encoder layers.

Run it to train the weights that the other benchmarks use: ``python benchmarks/paper_encoder.py``.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from photographs import CALIBRATION, crop, crops, photograph
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, FEED_FORWARD, MAX_LAYERS = 512, 8, 3200, 4
SIZES = {"224": (224, 224), "480": (480, 640)}
WEIGHTS = Path(__file__).resolve().parent.parent / "outputs" / "paper_encoder_trained.pt"


class FrozenBatchNorm2d(nn.Module):
    """Batch normalisation with fixed statistics, as detection and robot policies use it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift per channel; (N, C, H, W) -> (N, C, H, W)."""
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[None, :, None, None] + (self.bias - self.running_mean * scale)[None, :, None, None]


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = norm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(x)) + shortcut)


class EncoderLayer(nn.Module):
    """A post-norm Transformer encoder layer; the position is added to queries and keys."""

    def __init__(self, width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.expand, self.contract = nn.Linear(width, feed_forward), nn.Linear(feed_forward, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """(N, L, width), (1, L, width) -> (N, L, width)."""
        located = x + position
        query, key, value = self._split(self.query(located)), self._split(self.key(located)), self._split(self.value(x))
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.project(attended))
        return self.norm2(x + self.contract(functional.relu(self.expand(x))))


def sine_position(height: int, width: int, channels: int) -> Tensor:
    """2-D sine-cosine position, shape (1, height * width, channels)."""
    rows, columns = torch.meshgrid(torch.arange(1, height + 1), torch.arange(1, width + 1), indexing="ij")
    frequency = 10000 ** (-torch.arange(0, channels // 2, 2) / (channels // 2))
    parts = []
    for axis, size in ((rows, height), (columns, width)):
        angle = axis.flatten()[:, None] * 2 * math.pi / size * frequency
        parts += [angle.sin(), angle.cos()]
    return torch.cat(parts, dim=-1)[None]


class PaperEncoder(nn.Module):
    """ResNet18 + ``layers`` encoder layers: images (N, 3, H, W) in [0, 1] -> tokens (N, H/32 * W/32, 512).

    Args:
        layers: how many encoder layers: 0 is L0, 4 is L4.
        size: height and width of the images.
        norm: the normalisation; trainable while pretraining, frozen otherwise.
        every_cut: also return the tokens of every earlier cut, as a tuple L0 .. Lk.
    """

    def __init__(
        self,
        layers: int = MAX_LAYERS,
        size: tuple[int, int] = (224, 224),
        *,
        norm: type[nn.Module] = FrozenBatchNorm2d,
        every_cut: bool = False,
    ) -> None:
        super().__init__()
        self.every_cut = every_cut
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64)
        blocks, channels_in = [], 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Block(channels_in, channels, stride, norm), Block(channels, channels, 1, norm)]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.project = nn.Conv2d(512, WIDTH, 1)
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS, FEED_FORWARD) for _ in range(layers))
        position = sine_position(math.ceil(size[0] / 32), math.ceil(size[1] / 32), WIDTH)
        self.register_buffer("position", position, persistent=False)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(N, 3, H, W) -> (N, tokens, 512), or a tuple of them."""
        x = functional.relu(self.bn1(self.conv1((image - self.mean) / self.std)))
        x = self.project(self.blocks(functional.max_pool2d(x, 3, 2, 1)))
        x = x.flatten(2).transpose(1, 2)
        cuts = [x]
        for layer in self.layers:
            x = layer(x, self.position)
            cuts.append(x)
        return tuple(cuts) if self.every_cut else x


@torch.no_grad()
def _initialise(model: PaperEncoder) -> None:
    """As DETR and ACT do: He for the backbone, torch's default for the projection, Xavier for the Transformer."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module is not model.project:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.normal_(module.bias, std=0.02)


def encoder(weights: str, layers: int, size: tuple[int, int], *, every_cut: bool = False) -> PaperEncoder:
    """A frozen encoder in eval mode.

    Args:
        weights: "he" (He-initialised, batch-norm statistics from photographs) or "trained" (trained on first use).
        layers: number of encoder layers.
        size: height and width of the images.
        every_cut: return the tokens of every cut.
    """
    if weights == "trained":
        if not WEIGHTS.exists():
            pretrain(WEIGHTS)
        state = torch.load(WEIGHTS, weights_only=True)
    else:
        torch.manual_seed(0)
        source = PaperEncoder(MAX_LAYERS, norm=nn.BatchNorm2d)
        _initialise(source)
        for module in source.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0  # the statistics of the one batch that follows
        with torch.no_grad():
            source.train()(crops(CALIBRATION, (224, 224), 16, seed=5))
        state = source.state_dict()
    model = PaperEncoder(layers, size, every_cut=every_cut)
    wanted = model.state_dict().keys()
    model.load_state_dict({key: value for key, value in state.items() if key in wanted})
    return model.eval().requires_grad_(False)


def pretrain(target: Path, *, schedule: tuple[tuple[int, int, int], ...] = ((112, 32, 320), (224, 16, 60))) -> None:
    """Train on a pretext task, which photograph and which rotation, and keep the weights.

    Args:
        target: where to write the state dict.
        schedule: image size, batch size and steps, one after the other.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    photographs = [photograph(name) for name in CALIBRATION]
    model = PaperEncoder(MAX_LAYERS, norm=nn.BatchNorm2d)
    _initialise(model)
    heads = nn.ModuleList([nn.Linear(WIDTH, len(photographs)), nn.Linear(WIDTH, 4)])
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.02)
    total = sum(steps for _, _, steps in schedule)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, total_steps=total, pct_start=0.15)
    done, start = 0, time.perf_counter()
    for side, batch, steps in schedule:
        model.position = sine_position(math.ceil(side / 32), math.ceil(side / 32), WIDTH)
        for _ in range(steps):
            identity = torch.randint(len(photographs), (batch,), generator=generator)
            rotation = torch.randint(4, (batch,), generator=generator)
            images = torch.stack(
                [
                    torch.rot90(crop(photographs[int(index)], (side, side), generator), int(turn), (1, 2))
                    for index, turn in zip(identity, rotation, strict=True)
                ]
            )
            gain = 0.6 + 0.8 * torch.rand(batch, 3, 1, 1, generator=generator)
            pooled = model((images * gain).clamp(0, 1)).mean(dim=1)
            logits = [head(pooled) for head in heads]
            loss = functional.cross_entropy(logits[0], identity) + functional.cross_entropy(logits[1], rotation)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            rate.step()
            done += 1
            if done % 20 == 0 or done == total:
                right = [
                    (a.argmax(1) == b).float().mean().item() for a, b in zip(logits, (identity, rotation), strict=True)
                ]
                print(
                    f"step {done}/{total}  {side} px  loss {loss.item():.3f}  identity {right[0]:.2f}  "
                    f"rotation {right[1]:.2f}  {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    torch.save(model.state_dict(), temporary)
    temporary.replace(target)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--output", type=Path, default=WEIGHTS)
    pretrain(arguments.parse_args().output)
