"""torch.distributed.checkpoint writes straight into the checkpoint of the line, and reads it where it lies."""

from __future__ import annotations

import json
from pathlib import Path

from simulators.checkpoint_agent import CheckpointAgent, Line, kinds

SCRIPT = b"""
import json, os, pathlib
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard

dist.init_process_group()
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(4000.0)
state = {"sharded": distribute_tensor(full.clone(), mesh, [Shard(0)]), "same": full * 2, "step": 0}
if named := os.environ.get("GLASSHOUSE_RESUME"):
    state = {"sharded": distribute_tensor(torch.zeros(4000), mesh, [Shard(0)]), "same": torch.zeros(4000), "step": 0}
    dcp.load(state, checkpoint_id=named)
    found = [bool((state["sharded"].full_tensor() == full).all()), bool((state["same"] == full * 2).all())]
    pathlib.Path(f"outputs/{os.environ['RANK']}.json").write_text(json.dumps([*found, state["step"]]))
else:
    state["step"] = 3
    dcp.save(state, checkpoint_id="glasshouse://scratch/step-3")
    state["step"] = 6
    async_save(state, checkpoint_id="glasshouse://scratch/step-6").result()
    pathlib.Path(f"outputs/{os.environ['RANK']}.json").write_text(json.dumps(os.path.exists("scratch")))
dist.destroy_process_group()
"""


def test_ranks_save_into_the_line_and_load_from_where_it_lies(tmp_path: Path) -> None:
    line, params, files = Line(ranks=2), {"script": "train.py"}, {"train.py": SCRIPT}
    with CheckpointAgent(line, "script", params, files, tmp_path / "first", ranks=2) as agent:
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    assert kinds(ended.messages).count("part-end") == 2 * len(line.counted)
    assert 3 in line.counted, ended.log
    assert [json.loads(ended.outputs[f"{rank}.json"]) for rank in (0, 1)] == [False, False]  # no copy
    for step in line.counted.copy():
        with CheckpointAgent(line, "script", params, files, tmp_path / str(step), ranks=2, resume=step) as agent:
            ended = agent.run()
        assert ended.exit_code == 0, ended.log
        assert [json.loads(ended.outputs[f"{rank}.json"]) for rank in (0, 1)] == [[True, True, step]] * 2
