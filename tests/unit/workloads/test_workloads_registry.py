"""A workload is one module, one line in the registry and its name in the list: everything else follows from these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glasshouse.wire.policy import WORKLOADS
from glasshouse.workloads.registry import MODULES

MODULE = """
from dataclasses import dataclass
from typing import Annotated

from glasshouse.workloads.job_keys import integer
from glasshouse.workloads.params import NAME, Example, Params as Common

FRAMEWORKS = ("no_such_framework",)
EXAMPLE = Example(params={"data": "rows.txt"}, files={"rows.txt": "1 2 3"})


@dataclass(frozen=True, kw_only=True)
class Params(Common):
    INPUTS = ("data",)
    data: Annotated[str, NAME, "The rows to sort."]
    bins: Annotated[int, integer(1, 9), "How many bins."] = 3


def examine(params, files):
    return [f"{params.data} has {files[params.data].bytes} bytes"]


def requirements(params, names):
    return {"sorted": "sort by hand"} if params.bins > 3 else {}
"""

NEW = r"""
import sys
from pathlib import Path
import glasshouse.wire.policy as names
names.WORKLOADS = (*names.WORKLOADS, "sort")
from glasshouse.workloads.registry import MODULES, missing_frameworks
MODULES["sort"] = "sorting"

from glasshouse.evidence import artifact
from glasshouse.jobs.define.seal_job import content_of
from glasshouse.jobs.define.jobfile import load
from glasshouse.jobs.define.jobschema import schema
from glasshouse.jobs.define.jobschema import template
from glasshouse.package import manifest

made = template("sort")
for name, text in {"sort.toml": made.job, **made.files}.items():
    Path(name).write_text(text)
print("# bins = 3" in made.job, content_of(load(Path("sort.toml").absolute())).notes)
print([case["if"]["properties"]["workload"]["const"] for case in schema()["allOf"]])
print("sort" in artifact.WORKLOADS, "sort" in manifest.WORKLOADS)
print(missing_frameworks("sort"))
sys.path.insert(0, sys.argv[1])
import generate
print("## `[params]` of `sort`" in generate.render_job(), r"[lora\|script\|mlp\|sort]" in generate.render())
"""


def test_every_name_has_a_module() -> None:
    assert set(MODULES) == set(WORKLOADS)


def test_a_new_workload_needs_a_module_its_line_and_its_name(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "sorting.py").write_text(MODULE)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{NEW}"
    reference = request.config.rootpath / "docs" / "reference"
    done = subprocess.run(
        [sys.executable, "-c", code, str(reference)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            "True ['rows.txt has 5 bytes']",
            "['mlp', 'lora', 'script', 'sort']",
            "True True",
            "['no_such_framework']",
            "True True",
        ],
    )
