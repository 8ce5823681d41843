"""Trains a small classifier on the clinic's table and reports its accuracy on patients it has not seen.

Plain PyTorch, as it would run on a laptop: `python train.py`. It knows nothing of Glasshouse, which runs
it unchanged: files are where they always were, and what it writes to outputs/ comes back sealed.
"""

import argparse
import csv
import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def read_patients(path):
    """Return measurements (patients, 30) and labels: 1 for malignant."""
    with Path(path).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    labels = torch.tensor([1.0 if row.pop("diagnosis") == "malignant" else 0.0 for row in rows])
    return torch.tensor([[float(value) for value in row.values()] for row in rows]), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/patients.csv")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--out", default="outputs")
    options = parser.parse_args()

    torch.manual_seed(0)
    x, y = read_patients(options.data)
    order = torch.randperm(len(x))
    held_out, train = order[: len(x) // 5], order[len(x) // 5 :]
    mean, spread = x[train].mean(dim=0), x[train].std(dim=0)
    x = (x - mean) / spread

    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for epoch in range(1, options.epochs + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x[train]).squeeze(1), y[train])
        loss.backward()
        optimizer.step()
        if epoch == 1 or epoch % 25 == 0:
            print(f"epoch {epoch:4d}  loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        right = (model(x[held_out]).squeeze(1) > 0) == (y[held_out] > 0.5)
    accuracy = right.float().mean().item()
    print(f"held-out accuracy {accuracy:.3f} on {len(held_out)} of {len(x)} patients")

    out = Path(options.out)
    out.mkdir(exist_ok=True)
    save_file(dict(model.state_dict(), mean=mean, spread=spread), out / "model.safetensors")
    (out / "metrics.json").write_text(
        json.dumps({"held_out_accuracy": round(accuracy, 4), "held_out_patients": len(held_out)}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
