"""Which gradients DistributedDataParallel puts into which bucket: the shapes that a replay exchanges.

torch decides by itself (`_compute_bucket_assignment_by_size`); here it is only asked. From the second iteration on,
DDP assigns by the order in which gradients become ready, the reverse of the order of use, and fills buckets up to the
cap. Only without an explicit cap does the first bucket hold 1 MiB, so that communication begins early (torch 2.13: an
explicit cap of 25 MiB makes the first one 25 MiB as well).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist

from glasshouse.bench.collectives.models import Model

__all__ = ["DEFAULT_CAP_MIB", "Buckets", "assign", "buckets_of", "sample"]

DEFAULT_CAP_MIB = 25
FIRST_BYTES = 1 << 20


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


def assign(shapes: Sequence[torch.Size], *, cap_mib: int | None, dtype: torch.dtype) -> tuple[int, ...]:
    """Return how many elements each bucket holds from the second iteration on.

    Args:
        shapes: of the parameters in the order in which they are defined.
        cap_mib: `bucket_cap_mb`; None as DDP itself.
        dtype: of the gradients.
    """
    ready = [torch.empty(shape, dtype=dtype, device="meta") for shape in reversed(shapes)]
    limits = [FIRST_BYTES, DEFAULT_CAP_MIB << 20] if cap_mib is None else [cap_mib << 20]
    indices, _ = dist._compute_bucket_assignment_by_size(ready, limits)
    return tuple(sum(ready[index].numel() for index in bucket) for bucket in indices)


def buckets_of(model: Model, *, cap_mib: int | None, dtype: torch.dtype) -> Buckets:
    """Return the buckets of a model without giving it memory."""
    with torch.device("meta"):
        module = model.build()
    shapes = [parameter.shape for parameter in module.parameters() if parameter.requires_grad]
    elements = assign(shapes, cap_mib=cap_mib, dtype=dtype)
    return Buckets(elements=elements, whole_elements=sum(elements), whole_count=len(elements))


def sample(buckets: Buckets, *, most_elements: int) -> Buckets:
    """Return evenly spaced buckets that hold at most about `most_elements`; the same ones where all fit.

    At least one bucket stays, however large it is.
    """
    total = sum(buckets.elements)
    if total <= most_elements:
        return buckets
    keep = max(1, len(buckets.elements) * most_elements // total)
    chosen = [buckets.elements[index * len(buckets.elements) // keep] for index in range(keep)]
    while len(chosen) > 1 and sum(chosen) > most_elements:
        chosen.remove(max(chosen))
    return Buckets(elements=tuple(chosen), whole_elements=buckets.whole_elements, whole_count=buckets.whole_count)
