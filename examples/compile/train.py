"""Trains a small network that is compiled (torch.compile), as on any machine: `python train.py`.

It knows nothing of Glasshouse. `inductor` writes C++ for a CPU and Triton for a GPU, has a compiler make a library of
it and loads that. Where one of these cannot be done, `aot_eager` runs the same graph with PyTorch's own kernels.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def backend(device):
    """Return the backend of torch.compile that works here, by trying."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # no compiler, no room, no library may be loaded: README.md
        print(f"inductor does not work here: {str(error).strip().splitlines()[0]}")
        return "aot_eager"
    return "inductor"


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.rand(512, 2, device=device) * 2 - 1
    y = (x[:, :1] * x[:, 1:]).sin()
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    chosen = backend(device)
    compiled = torch.compile(model, backend=chosen)
    for step in range(1, 201):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.5f}", flush=True)

    apart = (compiled(x) - model(x)).abs().max().item()
    print(f"backend {chosen}; its answers are {apart:.0e} from those of the model that is not compiled")
    Path("outputs").mkdir(exist_ok=True)
    save_file(model.state_dict(), "outputs/model.safetensors")
    Path("outputs/metrics.json").write_text(json.dumps({"backend": chosen, "loss": loss.item(), "apart": apart}) + "\n")


if __name__ == "__main__":
    main()
