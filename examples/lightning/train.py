"""Trains a small network with Lightning on a table that it makes itself, as on any machine: `python train.py`.

It knows nothing of Glasshouse. The best weights and the curve in outputs/ come back sealed; checkpoints (.ckpt), which
are pickles, stay in scratch/.
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import save_file
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def rings(count, generator):
    """Return points of three rings around one centre, and which ring each is of."""
    label = torch.randint(3, (count,), generator=generator)
    angle = torch.rand(count, generator=generator) * 2 * torch.pi
    radius = label + 1 + torch.randn(count, generator=generator) / 10
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label)


class Rings(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))

    def training_step(self, batch):
        points, label = batch
        loss = functional.cross_entropy(self.layers(points), label)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch):
        points, label = batch
        found = self.layers(points)
        self.log("held_out_loss", functional.cross_entropy(found, label))
        self.log("held_out_accuracy", (found.argmax(1) == label).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main():
    lightning.seed_everything(0)
    generator = torch.Generator().manual_seed(0)
    best = ModelCheckpoint("scratch", monitor="held_out_loss", save_weights_only=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=8,
        callbacks=[best],
        logger=CSVLogger("outputs", name="", version=""),
        log_every_n_steps=8,
        enable_progress_bar=False,
    )
    model = Rings()
    trainer.fit(
        model,
        DataLoader(rings(960, generator), batch_size=64, shuffle=True),
        DataLoader(rings(240, generator), batch_size=240),
    )
    state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    save_file(state, "outputs/model.safetensors")
    print(f"held-out loss {best.best_model_score:.4f} of {best.best_model_path}")


if __name__ == "__main__":
    main()
