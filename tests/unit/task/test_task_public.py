"""What scripts may rely on, and what importing it must not drag along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import glasshouse.task
from glasshouse.task import Task

PUBLIC = {
    "asks_to_stop",
    "checkpoint",
    "close",
    "deterministic",
    "input_dir",
    "inputs",
    "last_report",
    "lay_out",
    "measure_by",
    "observe",
    "open",
    "output_dir",
    "params",
    "pass_on",
    "progress",
    "read_into",
    "resume",
    "save",
    "save_bytes",
    "save_checkpoint",
    "should_stop",
    "size",
    "stop_reason",
    "tensors",
    "workspace",
}


def test_the_public_names_are_pinned() -> None:
    assert sorted(glasshouse.task.__all__) == ["Task", "current"]
    assert {name for name in dir(Task) if not name.startswith("_")} | {"asks_to_stop"} == PUBLIC


def test_importing_it_loads_no_framework() -> None:
    code = "import sys, glasshouse.task; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_script_that_uses_it_can_be_tried_out_by_hand(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from glasshouse.task import current\n"
        "task = current()\n"
        "assert current() is task\n"
        "task.progress(1, 2, 0.5)\n"
        "assert task.input_dir.samefile('.')\n"
        "task.save_bytes('sum.txt', str(sum(map(int, task.open('data/n.txt')))).encode())\n"
        "(task.output_dir / 'kept.txt').write_text('kept')\n"
        "task.close()\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "n.txt").write_text("1\n2\n3\n")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True)
    assert (tmp_path / "outputs" / "sum.txt").read_text() == "6"
    assert (tmp_path / "outputs" / "kept.txt").read_text() == "kept"
