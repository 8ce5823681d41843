"""The models have the published sizes, and a replay exchanges the very buckets that DDP makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives.cells import TRAINED
from benchmarks.collectives.models import Buckets, buckets_of, build, inputs, sample

PARAMETERS = {
    "gpt2-14m": 13_842_432,
    "gpt2-27m": 27_336_704,
    "resnet-50": 25_557_032,
    "vit-b16": 86_567_656,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items())
def test_a_model_has_as_many_parameters_as_the_published_one(name: str, expected: int) -> None:
    buckets = buckets_of(name, cap_mib=None, dtype=torch.float32)
    assert buckets.whole_elements == sum(buckets.elements) == expected
    assert buckets.share == 1


def test_the_buckets_are_those_that_ddp_makes_by_itself(world_of_one: None) -> None:
    name, cap_mib = "resnet-2m", 1
    wrapped = DistributedDataParallel(build(name), bucket_cap_mb=cap_mib)
    images, targets = (part[:2] for part in inputs(name))
    for _ in range(2):
        functional.cross_entropy(wrapped(images).logits, targets).backward()
    wrapped(images)  # the buckets are made anew before the second forward pass, and told after it
    made = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    expected = buckets_of(name, cap_mib=cap_mib, dtype=torch.float32)
    assert [int(size) for size in made.split(",")] == [4 * count for count in expected.elements]
    assert expected.whole_count == len(expected.elements)


def test_without_a_cap_the_first_bucket_is_small_and_with_one_it_is_not() -> None:
    by_itself = buckets_of("gpt2-large", cap_mib=None, dtype=torch.float32)
    capped = buckets_of("vit-b16", cap_mib=25, dtype=torch.float32)
    alone = buckets_of("vit-b16", cap_mib=None, dtype=torch.float32)
    assert alone.elements[0] < capped.elements[0]
    assert len(by_itself.elements) > len(alone.elements)


def test_narrower_gradients_fill_fewer_buckets() -> None:
    wide = buckets_of("gpt2", cap_mib=25, dtype=torch.float32)
    narrow = buckets_of("gpt2", cap_mib=25, dtype=torch.bfloat16)
    assert len(narrow.elements) < len(wide.elements)
    assert sum(narrow.elements) == sum(wide.elements)


def test_a_sample_is_within_its_bound_and_knows_what_it_is_a_part_of() -> None:
    whole = buckets_of("gpt2-xl", cap_mib=None, dtype=torch.float32)
    part = sample(whole, most_elements=32 << 20)
    assert 0 < sum(part.elements) <= 32 << 20
    assert part.whole_count == len(whole.elements)
    assert part.share == sum(part.elements) / 1_557_611_200
    assert sample(whole, most_elements=1 << 40) == whole


def test_of_one_huge_bucket_the_sample_is_that_bucket() -> None:
    huge = Buckets(elements=(1_000, 10), whole_elements=1_010, whole_count=2)
    assert len(sample(huge, most_elements=1).elements) == 1


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_model_computes_a_finite_loss_on_its_own_inputs(name: str) -> None:
    torch.manual_seed(0)
    batch, targets = inputs(name)
    outputs = build(name)(batch).logits
    loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    assert torch.isfinite(loss)
