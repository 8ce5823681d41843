"""Trains a small network data-parallel with accelerate, as under `accelerate launch --num_processes 2 train.py`.

It knows nothing of Glasshouse, and names no backend: `glasshouse run job.toml --ranks 2` exchanges gradients sealed.
"""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def waves(count, seed):
    """Return waves of 32 values with noise, and whether each is a slow or a fast one."""
    generator = torch.Generator().manual_seed(seed)
    fast = torch.randint(2, (count,), generator=generator)
    phase = torch.rand(count, 1, generator=generator) * 6.3
    waves = ((1 + 2 * fast[:, None]) * torch.linspace(0, 6.3, 32) + phase).sin()
    return TensorDataset(waves + torch.randn(count, 32, generator=generator) / 2, fast)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = DataLoader(waves(640, seed=1), batch_size=16, shuffle=True)
    held_out = DataLoader(waves(200, seed=2), batch_size=25)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)

    for epoch in range(1, 5):
        model.train()
        for wave, fast in train:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(wave), fast)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.4f} on the first of {accelerator.num_processes} ranks")

    model.eval()
    right = []
    with torch.no_grad():
        for wave, fast in held_out:
            # Of all ranks, without what was added to make their last batches equally long.
            right.append(accelerator.gather_for_metrics(model(wave).argmax(1) == fast))
    right = torch.cat(right)
    accelerator.print(f"accuracy {right.float().mean().item():.3f} on {len(right)} waves that it has not seen")

    accelerator.save_model(model, "outputs")  # model.safetensors; by the first rank alone
    if accelerator.is_main_process:
        metrics = {"accuracy": right.float().mean().item(), "waves": len(right), "ranks": accelerator.num_processes}
        Path("outputs/metrics.json").write_text(json.dumps(metrics) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
