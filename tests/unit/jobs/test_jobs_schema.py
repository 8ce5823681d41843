"""The schema of a job file and its validator are one thing: both take the same jobs, and refuse the same."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode, UsageError
from glasshouse.jobs.define.jobfile import load, parse
from glasshouse.jobs.define.jobschema import schema
from glasshouse.jobs.define.seal_job import content_of
from glasshouse.jobs.define.wanted import format_text, parse_s
from glasshouse.workloads import registry
from glasshouse.workloads.job_keys import declared
from glasshouse.workloads.registry import MODULES

# But for hardware policies, which are no job files.
_TOML = sorted((Path(__file__).parents[3] / "examples").rglob("*.toml"))
EXAMPLES = [path for path in _TOML if path.parent.name != "hardware"]
SCRIPT = """\
workload = "script"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
"""
LORA = SCRIPT.replace('"script"', '"lora"', 1).replace('script = "train.py"', 'model = "config:qwen2-tiny"')
MLP = SCRIPT.replace('"script"', '"mlp"', 1).replace('script = "train.py"', "epochs = 5")

GOOD = [
    SCRIPT,
    LORA,
    MLP,
    MLP.replace("[params]\nepochs = 5\n", ""),
    SCRIPT + '[env]\nWANDB_MODE = "offline"\nEMPTY = ""\n',
    SCRIPT.replace('script = "train.py"', 'module = "pkg.train"\noutputs = ["outputs/", "a b/c"]\nthreads = 2'),
    SCRIPT.replace("[params]", '[params]\nrequirements = ["torch>=2.11,<3", "numpy", "x[y] ~= 1"]\narguments = [""]'),
    LORA.replace("config:qwen2-tiny", "inputs:models/x").replace(
        "[params]", "[params]\nlearning_rate = 1\nlora_dropout = 0.1"
    ),
    LORA.replace("config:qwen2-tiny", "Qwen/Qwen2.5-0.5B"),
    MLP.replace("[params]", '[params]\ndata = "a.csv"\nlabel = "y"\nlearning_rate = "0.001"'),
    SCRIPT + 'max_duration = "90s"\nlease = "10m"\nvalid = "7d"\nreleases = 3\negress = ["group"]\n',
    SCRIPT + "[checkpoints]\n",
    LORA + '[checkpoints]\nevery = "90s"\nmost = 3\nbytes = 4096\nretries = 2\n',
    SCRIPT + '[package]\nsuite = "ChaCha20-Poly1305"\nchunk_bytes = 65536\nbackup = ["a.pub"]\nfollow_links = true\n',
]
BAD = [
    "",
    SCRIPT.replace('workload = "script"\n', ""),
    SCRIPT.replace('"script"', '"diffusion"', 1),
    SCRIPT.replace('script = "train.py"\n', ""),
    SCRIPT.replace('[params]\nscript = "train.py"\n', ""),
    SCRIPT.replace("[params]", '[params]\nmodule = "pkg"'),
    SCRIPT.replace('script = "train.py"', 'module = "train.py"'),
    SCRIPT.replace("[params]", "[params]\nseed = true"),
    SCRIPT.replace("[params]", "[params]\nseed = -1"),
    SCRIPT.replace("[params]", '[params]\noutputs = "outputs"'),
    SCRIPT.replace("[params]", '[params]\noutputs = ["../up"]'),
    SCRIPT.replace("[params]", '[params]\noutputs = ["a", "a"]'),
    SCRIPT.replace("[params]", '[params]\noutputs = ["a\\n"]'),
    SCRIPT.replace("[params]", '[params]\nrequirements = ["x @ http://evil"]'),
    SCRIPT.replace("[params]", "[params]\nsurprise = 1"),
    SCRIPT.replace("[params]", '[params]\nenv = {A = "b"}'),
    SCRIPT + '[env]\nLD_PRELOAD = "/evil.so"\n',
    SCRIPT + '[env]\nPYTHONPATH = "x"\n',
    SCRIPT + '[env]\nGLASSHOUSE_OUTPUTS = "x"\n',
    SCRIPT + "[env]\nA = 1\n",
    SCRIPT + "[env]\n" + "".join(f'A{n} = ""\n' for n in range(65)),
    LORA + '[env]\nA = "b"\n',
    SCRIPT.replace('"train.py" = "train.py"\n', ""),
    SCRIPT.replace('"train.py" = "train.py"', '"train.py" = 3'),
    SCRIPT.replace("[inputs]", 'name = ""\n[inputs]'),
    SCRIPT.replace("[inputs]", 'name = "a\\tb"\n[inputs]'),
    SCRIPT.replace('assurance = "software"\n', ""),
    SCRIPT.replace('"standard"', '"off"'),
    SCRIPT + "lease = 90\n",
    SCRIPT + 'lease = "1 fortnight"\n',
    SCRIPT + 'lease = "10m\\n"\n',
    SCRIPT + "releases = 0\n",
    SCRIPT + "[package]\nchunk_bytes = 65537\n",
    SCRIPT + '[package]\nsuite = "DES"\n',
    SCRIPT + "[package]\nfollow_links = 1\n",
    SCRIPT + "[surprise]\n",
    SCRIPT + "[checkpoints]\nevery = 600\n",
    SCRIPT + "[checkpoints]\nbytes = 4095\n",
    SCRIPT + "[checkpoints]\nretries = 101\n",
    SCRIPT.replace("[params]", "[params]\ncheckpoints = {}"),
    LORA.replace('model = "config:qwen2-tiny"', ""),
    LORA.replace("config:qwen2-tiny", "config:gpt-9"),
    LORA.replace("config:qwen2-tiny", "a/b/c"),
    LORA.replace("[params]", "[params]\ntarget_modules = []"),
    LORA.replace("[params]", "[params]\npaced = true"),
    LORA.replace("[params]", "[params]\nlearning_rate = 11"),
    MLP.replace("[params]", '[params]\nlabel = "y"'),
    MLP.replace("[params]", '[params]\nlearning_rate = "fast"'),
]


@pytest.fixture(scope="module")
def validator() -> Any:
    # Takes two seconds to import, which each process of the suite would pay for at the top.
    jsonschema = pytest.importorskip("jsonschema")
    found = schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def takes(text: str) -> bool:
    try:
        parse(text.encode(), folder=Path("/somewhere"), default_name="job")
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_schema_and_validator_take_the_same_jobs(validator: Any, text: str) -> None:
    assert takes(text)
    assert list(validator.iter_errors(tomllib.loads(text))) == []


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_schema_and_validator_refuse_the_same_jobs(validator: Any, text: str) -> None:
    assert not takes(text)
    assert not validator.is_valid(tomllib.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        SCRIPT + 'lease = "100d"\n',
        SCRIPT + '[checkpoints]\nevery = "9s"\n',
        LORA.replace("[params]", '[params]\nlearning_rate = "11"'),
        MLP.replace("epochs = 5", "epochs = 5.0"),
        SCRIPT.replace('"software"', '"tpm"'),
        SCRIPT + 'egress = ["hub.example:443"]\n',
    ],
)
def test_what_no_schema_can_tell_the_validator_refuses(validator: Any, text: str) -> None:
    """As `BEYOND` says."""
    assert validator.is_valid(tomllib.loads(text))
    assert not takes(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(validator: Any, path: Path) -> None:
    assert list(validator.iter_errors(tomllib.loads(path.read_text()))) == []
    load(path)


@pytest.mark.parametrize("kind", MODULES)
def test_every_parameter_is_declared_once(kind: str) -> None:
    names = [field.name for field in declared(registry.load(kind).Params)]
    assert len(set(names)) == len(names)
    assert {field.name for field in fields(registry.load(kind).Params)} - {"checkpoints", "env"} == set(names)


@pytest.mark.parametrize("kind", MODULES)
def test_a_new_job_file_seals_and_every_line_of_it_may_be_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validator: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["new", kind]) == 0
    job = tmp_path / f"{kind}.toml"
    content_of(load(job))
    text = job.read_text()
    assert list(validator.iter_errors(tomllib.loads(text))) == []
    # Commented keys that show a value hold it; with all of them taken in, the job is the same.
    whole = re.sub(r"(?m)^# (\[\w+\]|\w+ = \S.*)$", r"\1", text)
    whole = re.sub(r"(?m)^.* =   # .*$", "", whole)
    left_out = {"script": 'WANDB_MODE = "offline"'}.get(kind, "\0")
    filled = load_text(whole.replace(left_out, ""), job)
    assert filled.deployment == load(job).deployment
    read = registry.parse(kind, filled.params)
    assert read.checkpoints is not None, (
        "a table that is not there means that there are none, and an empty one does not"
    )
    assert replace(read, checkpoints=None) == registry.parse(kind, load(job).params)
    capsys.readouterr()
    assert cli.run(["new", kind]) == ExitCode.USAGE
    assert "--force replaces it" in capsys.readouterr().err
    (tmp_path / "data.csv").write_text("mine")
    assert cli.run(["new", kind, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == []
    assert (tmp_path / "data.csv").read_text() == "mine"


def load_text(text: str, job: Path) -> Any:
    return parse(text.encode(), folder=job.parent, default_name=job.stem)


def test_a_workload_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["new", "diffusion", "-o", str(tmp_path / "x.toml")]) == ExitCode.USAGE
    assert "must be one of mlp, lora, script, not 'diffusion'" in capsys.readouterr().err


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


@pytest.mark.parametrize("seconds", [1, 90, 600, 3600, 86400, 604800])
def test_lengths_of_time_are_written_as_they_are_read(seconds: int) -> None:
    assert parse_s(format_text(seconds)) == seconds
