"""The measured models, of the published shapes with random weights, and the buckets that DDP makes of their gradients.

Law: a model of `REPLAYED` is never given memory; only the shapes of its parameters are read, in the order in which they
are defined, because that order decides the buckets.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.collectives.cells import REPLAYED, TRAINED

__all__ = ["Buckets", "buckets_of", "build", "inputs", "sample"]

# name: layers, width, heads, vocabulary, positions, and the batch of one rank
_GPT2 = {
    "gpt2-14m": (6, 384, 6, 8_192, 128, 4),
    "gpt2-27m": (6, 512, 8, 16_384, 64, 2),
    "gpt2": (12, 768, 12, 50_257, 1_024, 1),
    "gpt2-medium": (24, 1_024, 16, 50_257, 1_024, 1),
    "gpt2-large": (36, 1_280, 20, 50_257, 1_024, 1),
    "gpt2-xl": (48, 1_600, 25, 50_257, 1_024, 1),
}
_SMALL_RESNET: dict[str, Any] = {"embedding_size": 24, "hidden_sizes": [96, 192, 384, 768], "depths": [2, 2, 2, 2]}
_SMALL_VIT: dict[str, Any] = {
    "hidden_size": 192,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 64,
    "patch_size": 8,
}
# Imported once, by the process that the ranks are forked from.
MODULES = ["torch._dynamo", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "resnet", "vit"))]
_FIRST_BYTES, _DEFAULT_CAP_MIB = 1 << 20, 25


def build(name: str) -> Any:
    """Return a model on torch's default device; `torch.device("meta")` gives shapes without memory."""
    import transformers

    classes = 1_000 if name in REPLAYED else 100
    if name.startswith("gpt2"):
        layers, width, heads, vocabulary, positions, _ = _GPT2[name]
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=positions,
                # Every way computes the same gradients, so nothing is dropped by chance.
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                activation_function="gelu_pytorch_tanh", use_cache=False, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    if name.startswith("resnet"):
        small: dict[str, Any] = _SMALL_RESNET if name in TRAINED else {}
        model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=classes, **small))
        for module in model.modules():
            if "shortcut" in module._modules:  # defined first and used last: its gradients are ready first
                module._modules["shortcut"] = module._modules.pop("shortcut")
        return model
    small = _SMALL_VIT if name in TRAINED else {}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=classes, **small))


def inputs(name: str) -> tuple[Tensor, Tensor]:
    """Return one random batch of a rank and what it is to learn: text, or eight images of 64 × 64."""
    if name in _GPT2:
        *_, vocabulary, positions, batch = _GPT2[name]
        ids = torch.randint(0, vocabulary, (batch, positions + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return torch.randn(8, 3, 64, 64), torch.randint(0, 100, (8,))


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of a model, in the order in which their gradients become ready.

    Args:
        elements: of each bucket.
        whole_elements: of all gradients; more than the sum of `elements` where they are a sample.
        whole_count: buckets of the whole model.
    """

    _: KW_ONLY
    elements: tuple[int, ...]
    whole_elements: int
    whole_count: int

    @property
    def share(self) -> float:
        """The part of the gradients that these buckets hold."""
        return sum(self.elements) / self.whole_elements


def buckets_of(name: str, *, cap_mib: int | None, dtype: torch.dtype) -> Buckets:
    """Return the buckets of a model without giving it memory.

    From the second iteration on DDP assigns gradients in the reverse order of their definition, and fills buckets up to
    the cap. Only without an explicit cap does the first one hold 1 MiB (torch 2.13).

    Args:
        name: of the model.
        cap_mib: `bucket_cap_mb`; None for the default of DDP.
        dtype: of the gradients.
    """
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in build(name).parameters()]
    ready = [torch.empty(shape, dtype=dtype, device="meta") for shape in reversed(shapes)]
    limits = [_FIRST_BYTES, _DEFAULT_CAP_MIB << 20] if cap_mib is None else [cap_mib << 20]
    indices, _ = dist._compute_bucket_assignment_by_size(ready, limits)
    elements = tuple(sum(ready[index].numel() for index in bucket) for bucket in indices)
    return Buckets(elements=elements, whole_elements=sum(elements), whole_count=len(elements))


def sample(buckets: Buckets, *, most_elements: int) -> Buckets:
    """Return evenly spaced buckets that hold at most `most_elements`, and at least one; all of them where they fit."""
    total = sum(buckets.elements)
    if total <= most_elements:
        return buckets
    chosen = list(buckets.elements[:: math.ceil(total / most_elements)])
    while len(chosen) > 1 and sum(chosen) > most_elements:
        chosen.remove(max(chosen))
    return Buckets(elements=tuple(chosen), whole_elements=buckets.whole_elements, whole_count=buckets.whole_count)
