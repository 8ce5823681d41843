"""How far one record moves what the private example adds noise to, whatever it is; and what would break that."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest

PRIVATE = Path(__file__).resolve().parents[2] / "examples" / "private"
CLIP = 0.5
ROUNDING = 1e-4  # kernels round otherwise in a batch of another size
Sum: TypeAlias = Callable[..., dict[str, Any]]


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"private_{name}", PRIVATE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def train() -> ModuleType:
    return program("train")


def records(count: int) -> tuple[Any, Any]:
    import torch

    draw = torch.Generator().manual_seed(7)
    return torch.rand(count, 10, generator=draw) * 2 - 1, torch.randint(2, (count,), generator=draw).float()


# Answers and label of an ordinary record, and of those of someone who wants to be seen.
STRANGE = {
    "ordinary": (0.5, 1.0),
    "huge": (1e6, 1.0),
    "largest": (3e38, 0.0),
    "infinite": (float("inf"), 1.0),
    "no-number": (float("nan"), 1.0),
    "labelled": (0.5, 1e30),
}


def moved(found: Sum, network: Any, *, by: tuple[float, float], replaced: bool) -> float:
    """Return how far, in L2 over all weights together, the sum moves when a record `by` joins, or replaces another."""
    import torch

    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    x, y = records(24)
    answers, label = by
    kept = slice(1 if replaced else 0, None)
    other_x = torch.cat([x[kept], torch.full((1, 10), answers)])
    other_y = torch.cat([y[kept], torch.tensor([label])])
    one, two = found(network, weights, x, y, CLIP), found(network, weights, other_x, other_y, CLIP)
    return float(torch.cat([(one[name] - two[name]).double().flatten() for name in weights]).norm())


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("replaced", [False, True], ids=["joined", "replaced"])
@pytest.mark.parametrize("scale", [1.0, 50.0], ids=["fresh", "saturated"])
def test_one_record_moves_the_sum_by_no_more_than_the_bound(
    train: ModuleType, kind: str, replaced: bool, scale: float
) -> None:
    import torch

    torch.manual_seed(1)
    network = train.model()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(scale)
    bound = CLIP * (2 if replaced else 1)
    assert moved(train.clipped_sum, network, by=STRANGE[kind], replaced=replaced) <= bound * (1 + ROUNDING)


def test_the_bound_is_reached_and_no_record_is_no_gradient(train: ModuleType) -> None:
    import torch

    torch.manual_seed(1)
    network = train.model()
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    assert moved(train.clipped_sum, network, by=(-40.0, 1.0), replaced=False) >= CLIP * 0.99
    x, y = records(24)
    none = train.clipped_sum(network, weights, x[:0], y[:0], CLIP)
    assert all(not total.any() and total.shape == weights[name].shape for name, total in none.items())
    # Nothing is clipped where nothing is long: the sum is then that of plain training.
    free = train.clipped_sum(network, weights, x, y, 1e9)
    torch.nn.functional.binary_cross_entropy_with_logits(network(x).squeeze(1), y, reduction="sum").backward()
    for name, weight in network.named_parameters():
        torch.testing.assert_close(free[name], weight.grad)


def mean_clipped_as_a_whole(network: Any, weights: Any, x: Any, y: Any, clip: float) -> dict[str, Any]:
    """As Trainer's `max_grad_norm` does with the mean loss of a batch; times their number, so that it compares."""
    import torch

    def mean(weights: Any) -> Any:
        out = torch.func.functional_call(network, weights, (x,)).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(out, y)

    found = torch.func.grad(mean)(weights)
    length = float(torch.cat([each.flatten() for each in found.values()]).norm())
    return {name: each * min(1.0, clip / length) * len(x) for name, each in found.items()}


def normalised_by_the_batch(network: Any, weights: Any, x: Any, y: Any, clip: float) -> dict[str, Any]:
    """With the mean and deviation of the batch, as BatchNorm has them; each gradient is clipped all the same."""
    return program("train").clipped_sum(network, weights, (x - x.mean(dim=0)) / (x.std(dim=0) + 1e-5), y, clip)


@pytest.mark.parametrize("coupled", [mean_clipped_as_a_whole, normalised_by_the_batch])
def test_a_loss_that_couples_records_breaks_the_bound(train: ModuleType, coupled: Sum) -> None:
    import torch

    torch.manual_seed(1)
    assert moved(coupled, train.model(), by=(1e3, 1.0), replaced=True) > 2 * (2 * CLIP)


def test_noise_and_coins_are_what_the_accountant_takes_them_for(train: ModuleType) -> None:
    import torch

    drawn = train.normal(torch.zeros(200_000)).double()
    assert abs(float(drawn.mean())) < 0.015
    assert abs(float(drawn.std()) - 1) < 0.015
    assert abs(float((drawn.abs() > 1.96).double().mean()) - 0.05) < 0.005
    coins = train.uniform(200_000)
    assert 0 < float(coins.min()) <= float(coins.max()) < 1
    assert abs(float((coins < 0.1).double().mean()) - 0.1) < 0.005
    assert not torch.equal(train.uniform(8), train.uniform(8))


def test_epsilon_is_what_another_accountant_bounds_from_below() -> None:
    """Of the same mechanism: Opacus's other accountant composes numerically, and is tighter."""
    from opacus.accountants import PRVAccountant

    epsilon = program("epsilon")
    arguments = ["--records", "2000", "--batch", "200", "--steps", "120", "--noise", "2.0"]
    found = epsilon.epsilon(arguments)
    tight = PRVAccountant()
    tight.history = [(2.0, 0.1, 120)]
    assert 0 < tight.get_epsilon(delta=epsilon.DELTA) <= found < 3
    arguments[-1] = "1.0"
    assert epsilon.epsilon(arguments) > 2 * found
