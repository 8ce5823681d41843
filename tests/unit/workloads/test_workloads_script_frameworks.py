"""Scripts as people have them, in a real worker: each ends by itself, and reports what its framework's hooks tell."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.fake_agent import FakeAgent, run_raw

pytestmark = pytest.mark.slow  # together

TRAINER = """
import torch
from transformers import Trainer, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        predicted = self.layer(x).squeeze(-1)
        return {"loss": ((predicted - labels) ** 2).mean(), "logits": predicted}
rows = [{"x": torch.ones(4), "labels": torch.tensor(1.0)} for _ in range(16)]
arguments = TrainingArguments("outputs/run", max_steps=6, per_device_train_batch_size=2, logging_steps=2,
    gradient_accumulation_steps=2, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True)
trainer = Trainer(model=Net(), args=arguments, train_dataset=rows)
trainer.train()
trainer.evaluate(rows)
"""
LIGHTNING = """
import torch, {package} as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _index):
        return (self.layer(batch[0]) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 4)), batch_size=4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
pl.Trainer(max_epochs=2, accumulate_grad_batches=2, **quiet).fit(Net(), rows)
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
net = torch.compile(torch.nn.Linear(4, 1), backend="aot_eager")
rows = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
net, optimizer, rows = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), rows)
for row in rows:
    with accelerator.accumulate(net):
        accelerator.backward(net(row).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
# Workers of a loader, a writer of TensorBoard, and an optimizer in each of two processes, of which one reports.
TORCH = """
import torch
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
def train(batches):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in batches:
        net(batch).square().mean().backward()
        optimizer.step()
if __name__ == "__main__":
    train(DataLoader(torch.ones(16, 4), batch_size=2, num_workers=2, persistent_workers=True))
    other = torch.multiprocessing.get_context("spawn").Process(target=train, args=([torch.ones(2, 4)] * 3,))
    other.start()
    other.join()
    assert other.exitcode == 0
    writer = SummaryWriter("outputs/board")
    writer.add_scalar("loss", 0.5, 1)
"""
POOLS = """
import math, multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(2)
    found = pool.map(math.isqrt, [81, 100])
    left_open = ProcessPoolExecutor(1, mp_context=context)
    found.append(left_open.submit(math.isqrt, 121).result())
    Path("outputs/found").write_text(str(found))
"""
TREES = """
import numpy, xgboost
from pathlib import Path
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_score
x, y = numpy.arange(40.0).reshape(20, 2), numpy.arange(20) % 2
forest = RandomForestClassifier(4, n_jobs=2).fit(x, y)
cross_val_score(forest, x, y, cv=2, n_jobs=2)
booster = xgboost.train({"max_depth": 2}, xgboost.DMatrix(x, y), num_boost_round=3)
booster.save_model("outputs/trees.json")
"""


@pytest.fixture
def workspace() -> Iterator[Path]:
    """As short as a run's own: tensors go from process to process through a socket with a name in there."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def worker(workspace: Path, source: str) -> FakeAgent:
    return FakeAgent("script", {"script": "train.py"}, {"train.py": source.encode()}, workspace)


def skip_without(needed: list[str]) -> None:
    for name in needed:
        if importlib.util.find_spec(name) is None:  # not imported here: that takes seconds
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(
    ("needed", "source", "steps", "total", "loss", "outputs"),
    [
        pytest.param(["transformers", "accelerate"], TRAINER, 6, 6, True, 0, id="trainer"),
        pytest.param(["lightning"], LIGHTNING.format(package="lightning.pytorch"), 6, 6, True, 0, id="lightning"),
        pytest.param(["accelerate"], ACCELERATE, 4, None, False, 0, id="accelerate-compile"),
        pytest.param(["torch", "tensorboard"], TORCH, 8, None, False, 1, id="torch-tensorboard-loader-spawn"),
        pytest.param(["sklearn", "xgboost"], TREES, 0, None, False, 1, id="sklearn-xgboost"),
        pytest.param([], POOLS, 0, None, False, 1, id="pools-by-spawn"),
    ],
)
def test_a_script_of_a_framework_ends_by_itself_and_reports_its_steps(
    workspace: Path, needed: list[str], source: str, steps: int, total: int | None, loss: bool, outputs: int
) -> None:
    skip_without(needed)
    with worker(workspace, source) as agent:
        ended = agent.run()
    assert ended.types()[-1] == "finished", ended.log
    finished = ended.one("finished")
    assert (finished["work"]["done"], finished["work"]["unit"]) == (steps, "step"), ended.log
    assert finished["work"]["stop_reason"] == "finished"
    reports = [one for one in ended.messages if one["type"] == "progress"]
    assert {one["total"] for one in reports} == ({total} if steps else set())
    assert (finished["loss"] is not None) is loss
    assert len(ended.outputs) == outputs
    assert "no live progress" not in ended.log


STOPPED_LIGHTNING = LIGHTNING.format(package="pytorch_lightning").replace("max_epochs=2", "max_epochs=-1")


def test_an_owner_who_stops_a_lightning_script_has_stopped_it(workspace: Path) -> None:
    """Lightning meets an interrupt with an exit status of 1, which is no failure of the script."""
    skip_without(["pytorch_lightning"])
    with worker(workspace, STOPPED_LIGHTNING) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.give_grant()
        while agent.until("progress")["done"] < 1:
            pass
        agent.send({"type": "stop"})
        ended = agent.finish()
    assert ended.exit_code == 0, ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "stopped"


RANK = """
import os, torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3 + int(os.environ["RANK"])):
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""


def test_of_several_ranks_the_first_reports(tmp_path: Path) -> None:
    skip_without(["torch"])
    ended = run_raw("script", {"script": "train.py"}, {"train.py": RANK.encode()}, tmp_path, ranks=2)
    assert ended.types()[-1] == "finished", ended.log
    assert ended.one("finished")["work"]["done"] == 3
    assert next(one["done"] for one in ended.messages if one["type"] == "progress") == 1
