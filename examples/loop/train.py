"""A training loop as PyTorch's tutorials have it, with loader processes and curves for TensorBoard: `python train.py`.

It knows nothing of Glasshouse. Weights and curves in outputs/ come back sealed.
"""

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def main():
    torch.manual_seed(0)
    points = torch.rand(512, 8)
    loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=64, shuffle=True, num_workers=2)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    with SummaryWriter("outputs/curves") as curves:
        for epoch in range(1, 11):
            for batch, wanted in loader:
                loss = torch.nn.functional.mse_loss(model(batch), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            curves.add_scalar("loss", loss.item(), epoch)
            print(f"epoch {epoch:2d}  loss {loss.item():.4f}", flush=True)
    save_file(model.state_dict(), "outputs/model.safetensors")


if __name__ == "__main__":
    main()
