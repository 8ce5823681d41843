"""A script of `transformers.Trainer` as people write it, with the one line by which it goes on elsewhere."""

TRAIN = b"""
import os, sys
import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)
    def forward(self, x, labels):
        return {"loss": ((self.drop(self.inner(x)) - labels) ** 2).mean()}

torch.manual_seed(0)
data = [{"x": torch.randn(4), "labels": torch.randn(4)} for _ in range(22)]
args = TrainingArguments("scratch", max_steps=7, per_device_train_batch_size=int(sys.argv[1]), save_steps=2,
                         gradient_accumulation_steps=2, save_total_limit=1, report_to=[], use_cpu=True, seed=1)
trainer = Trainer(Model(), args, train_dataset=data)
trainer.train(resume_from_checkpoint=os.environ.get("GLASSHOUSE_RESUME"))
save_file(trainer.model.state_dict(), "outputs/model.safetensors")
"""
