"""The pages for those who train: their commands run on the examples as they are printed, and their table holds."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from simulators.command_line import Shell
from tools.pages import blocks, commands, typed

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
SECTIONS = {
    f"{page}, {title}": text
    for page in ("fine-tune", "scripts", "differential-privacy")
    for title, text in re.findall(r"^#+ ([^\n]+)\n(.*?)(?=^## |\Z)", (HOW_TO / f"{page}.md").read_text(), re.M | re.S)
}
TYPED = [name for name, text in SECTIONS.items() if commands(text)]


@pytest.mark.slow
@pytest.mark.parametrize("section", TYPED)
def test_the_examples_run_and_print_what_the_pages_show(tmp_path: Path, section: str) -> None:
    shell = Shell(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    assert shell.ask("init").code == 0
    typed(shell, SECTIONS[section])
    for fetched in (tmp_path / "build").iterdir():
        assert list(fetched.rglob("*.safetensors")), f"nothing was trained: {list(fetched.rglob('*'))}"
    assert shell.left_running() == []


def test_every_example_is_in_the_list_and_on_a_page() -> None:
    listed = re.findall(r"^\| \W?(\w+)", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    pages = [*SECTIONS.values(), (ROOT / "examples" / "clinic" / "README.md").read_text()]
    jobs = [path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.toml") if path.parent.name != "hardware"]
    assert len(jobs) > 6
    for job in jobs:
        assert job.parent.name in listed
        assert any(f"glasshouse run {job.as_posix()}" in page for page in pages), job


@pytest.mark.parametrize("page", ["fine-tune", "scripts"])
def test_the_job_files_of_the_pages_are_some(tmp_path: Path, page: str) -> None:
    from glasshouse.jobs.define.jobfile import load

    (tmp_path / "job.toml").write_text("".join(blocks("toml", (HOW_TO / f"{page}.md").read_text())))
    assert load(tmp_path / "job.toml").workload in ("lora", "script")


def test_the_table_of_names_is_what_lora_takes_and_what_hugging_face_has() -> None:
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import SFTConfig

    from glasshouse.workloads.lora.lora_params import LoraParams

    rows = re.findall(
        r"^\| (`[^|]+) \| ([^|]*?) ?\| ([^|]*?) ?\|$",
        SECTIONS["fine-tune, What you write in Hugging Face, and what here"],
        re.M,
    )
    table = [(re.findall(r"`(\w+)`", there), re.findall(r"`(\w+)`", here), how) for there, here, how in rows]
    declared = {field.name for field in dataclasses.fields(LoraParams)}
    # Of the job and its machine: nothing there is like them.
    own = {"base_name", "threads", "max_outputs", "max_output_bytes", "slots", "profile", "checkpoints"}
    named = {name for _there, here, _how in table for name in here}
    assert named == declared - own, "the table has other names than the job file"
    of = {
        kind.__name__: {field.name for field in dataclasses.fields(kind)}
        for kind in (LoraConfig, TrainingArguments, SFTConfig)
    }
    for there, here, how in table:
        if how.startswith("the same"):
            assert set(here) <= of.get(there[0], declared), f"{there[0]} has no such names"
        else:
            assert set(there) <= set(LoraParams.ELSEWHERE), "a job file with them is not told what the table tells"
