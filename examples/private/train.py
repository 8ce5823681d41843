"""Trains on patients so that the weights say little about any one of them: DP-SGD, in plain PyTorch.

In each step every patient takes part by a coin of their own, has a gradient of their own, clipped to --clip, and noise
is added to the sum. Source: Abadi et al., Deep Learning with Differential Privacy (2016), algorithm 1. What it costs in
privacy follows from the options alone: epsilon.py. Law: nothing but `clipped_sum` sees patients.csv, and what of it is
printed or saved has had noise added.
"""

import argparse
import csv
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.func import functional_call, grad, vmap


def model():
    return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def read(path):
    """Return answers (patients, 10) from -1 to 1, by the questionnaire's scale and not the data's own, and labels."""
    with Path(path).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    labels = torch.tensor([float(row.pop("came_again")) for row in rows])
    return torch.tensor([[float(answer) for answer in row.values()] for row in rows]).clamp(0, 10) / 5 - 1, labels


def loss_of_one(network, weights, x, y):
    """Return the loss of one record, in which no other has a part."""
    return torch.nn.functional.binary_cross_entropy_with_logits(functional_call(network, weights, (x,)).squeeze(-1), y)


def clipped_sum(network, weights, x, y, clip):
    """Return the sum of the gradients of single records, none of which is longer than `clip`.

    One record more or less changes it by at most `clip` (L2, over all weights together), another in its place by twice
    that.
    """
    if len(x) == 0:
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}
    own = vmap(grad(loss_of_one, argnums=1), in_dims=(None, None, 0, 0))(network, weights, x, y)
    # In double precision: of a record that was made for it, squares overflow, and infinity times nothing is no number.
    norms = torch.stack([each.double().flatten(1).norm(dim=1) for each in own.values()]).norm(dim=0)
    scale = torch.where(norms.isfinite(), (clip / norms).clamp(max=1.0), 0.0)
    return {
        name: torch.einsum("n...,n->...", each.nan_to_num(0.0, 0.0, 0.0).double(), scale).to(each.dtype)
        for name, each in own.items()
    }


def uniform(count):
    """Return numbers in (0, 1) of the kernel's cryptographic generator: a seed is guessed, and noise taken off."""
    drawn = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return ((drawn >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)


def normal(like):
    """Return noise of deviation 1: of four draws, so that the last bits of one say nothing (Holohan, Braghin 2021)."""
    drawn = torch.special.ndtri(uniform(4 * like.numel())).reshape(4, *like.shape)
    return (drawn.sum(dim=0) / 2).to(like)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, required=True, help="how many patients there are; public")
    parser.add_argument("--batch", type=int, required=True, help="how many take part in a step, on average")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--noise", type=float, required=True, help="deviation of the noise, in multiples of --clip")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    options = parser.parse_args()
    torch.manual_seed(0)  # the first weights, which nothing depends on; noise and coins have no seed

    x, y = read("data/patients.csv")
    network = model()
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    for _ in range(options.steps):
        taken = uniform(len(x)) < options.batch / options.records
        total = clipped_sum(network, weights, x[taken], y[taken], options.clip)
        for name, weight in weights.items():
            noisy = total[name] + options.noise * options.clip * normal(weight)
            # By the average number: how many there were is a secret too.
            weight -= options.learning_rate * noisy / options.batch

    with torch.no_grad():
        other_x, other_y = read("data/others.csv")
        right = (functional_call(network, weights, (other_x,)).squeeze(-1) > 0) == (other_y > 0.5)
    print(f"accuracy {right.float().mean().item():.3f} on {len(right)} others, whom the guarantee does not cover")
    Path("outputs").mkdir(exist_ok=True)
    save_file(weights, "outputs/model.safetensors")
    Path("outputs/metrics.json").write_text(
        json.dumps({"accuracy": right.float().mean().item(), **vars(options)}) + "\n"
    )


if __name__ == "__main__":
    main()
