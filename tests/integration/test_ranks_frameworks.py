"""Scripts of Trainer, Accelerate and Lightning, as they stand, in ranks: the weights that torchrun makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.errors import ExitCode
from tools.machine import needs_filters, needs_landlock, needs_namespaces
from tools.runtime_world import World, ended, workload_world

pytestmark = [needs_namespaces, needs_filters, needs_landlock, pytest.mark.slow]

CONFINED = Path(__file__).parents[1] / "tools" / "confined.py"
CONTAINER = (str(CONFINED), *(("SHM=1g",) if os.geteuid() == 0 else ()), "-m", "glasshouse.runtime")

TRAINER = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(3)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=2, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (32, 16), generator=torch.manual_seed(1))]
arguments = TrainingArguments(
    "outputs/run", per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, report_to=[], logging_steps=1,
    save_strategy="no", seed=3, disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
assert arguments.world_size == 2
trainer.train()
trainer.save_model("outputs/model")
"""

ACCELERATE = """
import torch
from accelerate import Accelerator

torch.manual_seed(3)
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for given, wanted in loader:
    loss = ((model(given) - wanted) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
assert accelerator.gather(loss.detach().reshape(1)).numel() == accelerator.num_processes == 2
accelerator.save_model(model, "outputs/model")
"""

LIGHTNING = """
import lightning, torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, _):
        loss = ((self.inner(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

lightning.seed_everything(3)
model = Model()
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=8))
assert trainer.world_size == 2
"""

# What each rank has at the end, whatever trained it.
ENDS = """
import hashlib, os, pathlib
import torch.distributed as dist
assert dist.get_backend() == os.environ.get("BACKEND", "sealed")
weights = b"".join(part.detach().numpy().tobytes() for part in model.parameters())
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/rank-{os.environ['RANK']}").write_text(hashlib.sha256(weights).hexdigest())
"""

SCRIPTS = {"transformers": TRAINER, "accelerate": ACCELERATE, "lightning": LIGHTNING}


def by_torchrun(script: str, folder: Path) -> set[bytes]:
    """Return what two ranks over gloo, in the clear, make of a script."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",  # as by accelerate launch --cpu
        "BACKEND": "gloo",
        "GLOO_SOCKET_IFNAME": "lo",  # else gloo looks for the machine's name
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for _ in range(3):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        # Under load a process of PyTorch's own can abort while gloo's threads end, when all is done.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return {(folder / "outputs" / f"rank-{rank}").read_bytes() for rank in range(2)}


@pytest.mark.parametrize(
    ("framework", "container"),
    [
        ("transformers", True),
        pytest.param("lightning", False, marks=pytest.mark.long),
        pytest.param("accelerate", True, marks=pytest.mark.long),
        pytest.param("accelerate", False, marks=pytest.mark.long),
        pytest.param("transformers", False, marks=pytest.mark.long),
        pytest.param("lightning", True, marks=pytest.mark.long),
    ],
)
def test_a_script_of_torchruns_gives_the_same_weights_bit_by_bit(
    script_worlds: Callable[..., World], tmp_path: Path, framework: str, container: bool
) -> None:
    pytest.importorskip(framework)
    script = SCRIPTS[framework] + ENDS
    plain = by_torchrun(script, tmp_path / "plain")
    assert len(plain) == 1, "one model"
    program = {"program": CONTAINER} if container else {}
    # Trainer saves its arguments beside the model, and they are a pickle.
    agent = script_worlds(script, {}, allow_pickle=True).start(ranks=2, **program)
    agent.wait(within_s=180)
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    outputs = agent.outputs()
    assert {outputs["rank-0"], outputs["rank-1"]} == plain
    assert any(event["type"] == "progress" for event in agent.events())
    said = "glasshouse: the group of gloo is sealed, as all are: what ranks send each other is encrypted"
    assert agent.log().splitlines().count(said) == 2


@pytest.mark.parametrize("container", [True, pytest.param(False, marks=pytest.mark.long)])
def test_lora_in_ranks_reads_its_records_from_the_package_and_one_adapter_leaves(
    tmp_path: Path, broker: BrokerProcess, container: bool
) -> None:
    records = b"".join(b'{"prompt": "%d?", "completion": "%d"}\n' % (n, n % 2) for n in range(16))
    params = {"model": "config:qwen2-tiny", "data": "train.jsonl", "max_steps": 1, "per_device_train_batch_size": 2}
    with workload_world(tmp_path, "lora", params, {"train.jsonl": records}, broker=broker) as world:
        agent = world.start(ranks=2, **({"program": CONTAINER} if container else {}))
        agent.wait(within_s=180)
        verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
        outputs = agent.outputs()
    work, loss = verdict.chain.receipt.work, verdict.chain.receipt.loss
    assert (work.done, work.stop_reason) == (1, "steps"), "as rank 0 says"
    assert loss is not None
    assert loss.first == loss.final, "the mean of the ranks is of both ends of a single step"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(outputs)
    assert agent.log().count("adapter_model.safetensors sha256") == 1
