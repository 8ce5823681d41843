"""The measured models, as small torch modules of the published shapes with random weights.

Law: a `Kind.REPLAY` model is never built with memory; only the shapes of its parameters are read, in the order in
which they are defined, because that order decides the buckets. Sources of the shapes: GPT-2 (Radford et al. 2019),
ResNet (He et al. 2016), ViT (Dosovitskiy et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "Kind", "Model", "model_named"]


class Kind(StrEnum):
    """Whether a model is trained here, or only its gradients' shapes are exchanged."""

    TRAIN = "train"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the characterisation.

    Args:
        name: as the command line and the tables say it.
        kind: how it is measured.
        build: makes the module on the default device of torch; `torch.device("meta")` gives shapes without memory.
        inputs: makes one batch of a rank.
        shown: what it is, for people.
        bars: bar on iteration time as a ratio to raw gloo by number of ranks, with the default buckets.
    """

    _: KW_ONLY
    name: str
    kind: Kind
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    shown: str
    bars: Mapping[int, float] | None = None


class Attention(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return found


class Block(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A transformer block, normalised before its parts."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        x = x + self.attention(self.before(x))
        found: Tensor = x + self.narrow(functional.gelu(self.wide(self.between(x)), approximate="tanh"))
        return found


class Gpt2(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """GPT-2: learned positions, tied output weights."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.last(x), self.tokens.weight)


class Vit(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A vision transformer with a class token."""

    def __init__(self, *, layers: int, width: int, heads: int, image: int, patch: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[batch, 3, side, side]`` to logits ``[batch, classes]``."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x[:, 0]))
        return found


class Bottleneck(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A residual block of three convolutions, four times as wide at its end."""

    def __init__(self, inward: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inward, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1, 1),
        )
        same = stride == 1 and inward == 4 * width
        self.aside = nn.Identity() if same else nn.Sequential(*_convolution(inward, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, inward, side, side]`` to ``[batch, 4 × width, side / stride, side / stride]``."""
        return functional.relu(self.body(x) + self.aside(x))


class ResNet(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A residual network of bottlenecks."""

    def __init__(self, *, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages, inward = [], width
        for stage, count in enumerate(blocks):
            inside = width << stage
            for number in range(count):
                stages.append(Bottleneck(inward, inside, 2 if stage and not number else 1))
                inward = 4 * inside
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inward, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[batch, 3, side, side]`` to logits ``[batch, classes]``."""
        found: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return found


def _convolution(inward: int, outward: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inward, outward, size, stride, size // 2, bias=False), nn.BatchNorm2d(outward)


def _text(*, batch: int, tokens: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make() -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (batch, tokens + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return make


def _images(*, batch: int, side: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,)))


def _gpt2(name: str, shown: str, *, layers: int, width: int, heads: int) -> Model:
    return Model(
        name=name,
        kind=Kind.REPLAY,
        shown=shown,
        build=lambda: Gpt2(layers=layers, width=width, heads=heads, vocabulary=50_257, positions=1_024),
        inputs=_text(batch=1, tokens=1_024, vocabulary=50_257),
    )


def _small_gpt2(name: str, shown: str, bar: float, *, batch: int, tokens: int, vocabulary: int, **shape: Any) -> Model:
    return Model(
        name=name,
        kind=Kind.TRAIN,
        shown=shown,
        bars={2: bar},
        build=lambda: Gpt2(vocabulary=vocabulary, positions=tokens, **shape),
        inputs=_text(batch=batch, tokens=tokens, vocabulary=vocabulary),
    )


_ALL = (
    _small_gpt2(
        "gpt2-14m",
        "GPT-2, 13.8 M parameters, 4 × 128 tokens a rank",
        1.03,
        batch=4,
        tokens=128,
        vocabulary=8_192,
        layers=6,
        width=384,
        heads=6,
    ),
    _small_gpt2(
        "gpt2-27m",
        "GPT-2, 27.3 M parameters, 2 × 64 tokens a rank",
        1.06,
        batch=2,
        tokens=64,
        vocabulary=16_384,
        layers=6,
        width=512,
        heads=8,
    ),
    Model(
        name="resnet-2m",
        kind=Kind.TRAIN,
        shown="ResNet of bottlenecks, 2.1 M parameters, 8 images of 64 × 64 a rank",
        build=lambda: ResNet(blocks=(2, 2, 2, 2), width=24, classes=100),
        inputs=_images(batch=8, side=64, classes=100),
    ),
    Model(
        name="vit-6m",
        kind=Kind.TRAIN,
        shown="ViT, 5.4 M parameters, 8 images of 64 × 64 a rank",
        build=lambda: Vit(layers=12, width=192, heads=3, image=64, patch=8, classes=100),
        inputs=_images(batch=8, side=64, classes=100),
    ),
    Model(
        name="resnet-50",
        kind=Kind.REPLAY,
        shown="ResNet-50, 25.6 M parameters",
        build=lambda: ResNet(blocks=(3, 4, 6, 3), width=64, classes=1_000),
        inputs=_images(batch=32, side=224, classes=1_000),
    ),
    Model(
        name="vit-b16",
        kind=Kind.REPLAY,
        shown="ViT-B/16, 86.6 M parameters",
        build=lambda: Vit(layers=12, width=768, heads=12, image=224, patch=16, classes=1_000),
        inputs=_images(batch=32, side=224, classes=1_000),
    ),
    _gpt2("gpt2", "GPT-2 S, 124 M parameters", layers=12, width=768, heads=12),
    _gpt2("gpt2-medium", "GPT-2 M, 355 M parameters", layers=24, width=1_024, heads=16),
    _gpt2("gpt2-large", "GPT-2 L, 774 M parameters", layers=36, width=1_280, heads=20),
    _gpt2("gpt2-xl", "GPT-2 XL, 1,558 M parameters", layers=48, width=1_600, heads=25),
)
MODELS: Mapping[str, Model] = {model.name: model for model in _ALL}


def model_named(name: str) -> Model:
    """Return a model of the characterisation; raises `KeyError`."""
    return MODELS[name]
