"""A job file is strict: each mistake is one sentence that names the key and what it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.jobs.define.jobfile import Job, load, parse
from glasshouse.jobs.define.wanted import parse_s
from glasshouse.jobs.owner.durations import format_s
from glasshouse.wire.crypto import Suite
from glasshouse.wire.policy import Assurance, Profile

GOOD = """
workload = "script"
name = "clinic"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
max_duration = "2h"
lease = "90s"
releases = 2
[package]
suite = "ChaCha20-Poly1305"
chunk_bytes = 65536
"""


def read(text: str) -> Job:
    return parse(text.encode(), folder=Path("/somewhere"), default_name="job")


def test_a_good_job_file_says_everything() -> None:
    job = read(GOOD)
    assert (job.name, job.workload, dict(job.inputs)) == ("clinic", "script", {"train.py": "train.py"})
    assert (job.floor.assurance, job.floor.profile, job.floor.egress) == (Assurance.SOFTWARE, Profile.STANDARD, ())
    assert (job.deployment.max_duration_s, job.deployment.lease_s, job.deployment.releases) == (7200, 90, 2)
    assert (job.suite, job.chunk_bytes) == (Suite.CHACHA20_POLY1305, 65536)


def test_files_lie_in_memory_unless_the_owner_says_disk() -> None:
    assert not read(GOOD).floor.disk
    assert not read(GOOD.replace("releases = 2", 'workspace = "memory"')).floor.disk
    assert read(GOOD.replace("releases = 2", 'workspace = "disk"')).floor.disk
    with pytest.raises(UsageError, match=r"policy\.workspace.*'memory', 'disk'"):
        read(GOOD.replace("releases = 2", 'workspace = "tape"'))


def test_what_may_be_left_out_has_a_safe_meaning() -> None:
    text = GOOD.partition("max_duration")[0].replace('name = "clinic"\n', "")
    job = read(text)
    assert (job.name, job.suite, job.deployment.releases) == ("job", Suite.AES_256_GCM, 1)


@pytest.mark.parametrize(
    ("before", "after", "key", "allowed"),
    [
        ('workload = "script"', 'workload = "scrpt"', "workload", "'lora', 'mlp', 'script'"),
        ('workload = "script"', "", "workload", "'lora', 'mlp', 'script'"),
        ('assurance = "software"', "", "policy.assurance", "'software', 'tpm', 'cpu-tee', 'gpu-tee'"),
        ('assurance = "software"', 'assurance = "none"', "policy.assurance", "'software', 'tpm'"),
        ('profile = "standard"', 'profile = "off"', "policy.profile", "'standard', 'strict'"),
        ('profile = "standard"', "", "policy.profile", "'standard', 'strict'"),
        ('lease = "90s"', "lease = 90", "policy.lease", "text"),
        ('lease = "90s"', 'lease = "1 fortnight"', "policy.lease", "'90s', '10m', '2h' or '7d'"),
        ('lease = "90s"', 'lease = "100d"', "policy.lease", "at most 24h"),
        ("releases = 2", "releases = 0", "policy.releases", "from 1 to"),
        ("releases = 2", "releases = true", "policy.releases", "whole number"),
        ("releases = 2", 'egress = ["example"]', "policy.egress", "host:port"),
        ("chunk_bytes = 65536", "chunk_bytes = 100", "package.chunk_bytes", "one of 1024"),
        ("chunk_bytes = 65536", "chunk_bytes = 65537", "package.chunk_bytes", "one of 1024"),
        ('suite = "ChaCha20-Poly1305"', 'suite = "DES"', "package.suite", "'AES-256-GCM', 'ChaCha20-Poly1305'"),
        ('"train.py" = "train.py"', '"train.py" = 3', "inputs.train.py", "path"),
        ('script = "train.py"', "script = 3", "params.script", "text"),
        ('script = "train.py"', "", "params.script", "exactly one"),
        ('script = "train.py"', 'script = "train.py"\nscipt = 1', "params.scipt", "not known"),
        ('name = "clinic"', 'name = ""', "name", "1 to 80"),
    ],
)
def test_each_mistake_names_its_key_and_what_it_may_be(before: str, after: str, key: str, allowed: str) -> None:
    assert before in GOOD
    with pytest.raises(UsageError) as refused:
        read(GOOD.replace(before, after))
    error = refused.value
    assert error.exit_code is ExitCode.USAGE
    assert error.code is Code.JOB_INVALID
    assert key in error.message
    assert allowed in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("where", "added", "shown", "near"),
    [
        ("[inputs]", 'worklaod = "lora"\n[inputs]', "worklaod", "workload"),
        ("[policy]", '[policy]\nmax_durations = "1h"', "policy.max_durations", "max_duration"),
        ("[package]", "[package]\nchunks = 1", "package.chunks", ""),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(where: str, added: str, shown: str, near: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(GOOD.replace(where, added))
    assert f"{shown} is not known" in refused.value.message
    assert near in refused.value.hint


@pytest.mark.parametrize("level", ["tpm", "cpu-tee", "gpu-tee"])
def test_a_level_without_a_chain_to_the_runtime_is_refused_before_anything_is_rented(level: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(GOOD.replace('"software"', f'"{level}"'))
    assert refused.value.code is Code.CHAIN_MISSING
    assert refused.value.exit_code is ExitCode.USAGE
    assert level in refused.value.message
    assert "policy.hardware" in refused.value.message


def test_the_machines_of_a_run_may_talk_to_each_other_when_their_owner_says_so() -> None:
    assert read(GOOD.replace("releases = 2", 'egress = ["group"]')).floor.egress == ("group",)
    with pytest.raises(UsageError) as refused:
        read(GOOD.replace("releases = 2", 'egress = ["group", "hub.example:443"]'))
    assert refused.value.code is Code.POLICY_IMPOSSIBLE


def test_a_network_that_cannot_be_limited_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        read(GOOD.replace("releases = 2", 'egress = ["hub.example:443"]'))
    assert refused.value.code is Code.POLICY_IMPOSSIBLE
    assert "policy.egress" in refused.value.message


@pytest.mark.parametrize("text", ["workload = ", "\x00", "[inputs", 'workload = "lora"\nworkload = "mlp"'])
def test_what_is_no_toml_says_so(text: str) -> None:
    with pytest.raises(UsageError, match="not TOML"):
        read(text)


def test_bytes_that_are_no_text_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not TOML"):
        parse(b"\xff\xfe", folder=tmp_path, default_name="job")
    with pytest.raises(UsageError) as missing:
        load(tmp_path / "absent.toml")
    assert missing.value.code is Code.FILE_MISSING


def test_a_table_where_a_value_belongs_and_the_reverse() -> None:
    with pytest.raises(UsageError, match="inputs must be a table"):
        read(GOOD.replace('[inputs]\n"train.py" = "train.py"', "").replace("name =", 'inputs = "train.py"\nname ='))
    with pytest.raises(UsageError, match="inputs must be a table of 1 to 4096"):
        read(GOOD.replace('"train.py" = "train.py"', ""))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("7d", 604800), ("0s", None), ("-1s", None), ("1", None)],
)
def test_lengths_of_time(text: str, seconds: int | None) -> None:
    assert parse_s(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "0.00 s"), (9.994, "9.99 s"), (12.34, "12.3 s"), (99.96, "1 min 40 s"), (7620, "2 h 07 min")],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_s(seconds) == text


def test_a_misspelt_table_that_must_be_there_is_told_apart_from_a_missing_one() -> None:
    with pytest.raises(UsageError) as wrong:
        read(GOOD.replace("[policy]", "[polcy]"))
    assert "policy is missing" in wrong.value.message
    assert wrong.value.hint == "'polcy' is not known: did you mean 'policy'?"
    with pytest.raises(UsageError) as misspelt:
        read(GOOD.replace("assurance =", "asurance ="))
    assert misspelt.value.hint == "'policy.asurance' is not known: did you mean 'policy.assurance'?"


def test_links_are_followed_only_where_the_job_file_says_so() -> None:
    assert not read(GOOD).follow_links
    assert read(GOOD + "follow_links = true\n").follow_links
    with pytest.raises(UsageError, match=r"the job file's package.follow_links must be true or false, not 1"):
        read(GOOD + "follow_links = 1\n")


def test_the_environment_is_sealed_with_a_scripts_parameters_and_is_no_other_workloads() -> None:
    assert read(GOOD + '[env]\nWANDB_MODE = "offline"\n').params["env"] == {"WANDB_MODE": "offline"}
    assert "env" not in read(GOOD).params
    with pytest.raises(UsageError, match="the job file's the name 'LD_PRELOAD' in env must be"):
        read(GOOD + '[env]\nLD_PRELOAD = "/evil.so"\n')
    with pytest.raises(UsageError, match=r"params.env must be a table of its own"):
        read(GOOD.replace("[params]", '[params]\nenv = {A = "b"}'))
    lora = GOOD.replace('"script"', '"lora"', 1).replace('script = "train.py"', 'model = "config:qwen2-tiny"')
    with pytest.raises(UsageError, match="env must be absent: it is for scripts"):
        read(lora + '[env]\nA = "b"\n')


def test_a_text_without_quotes_is_told_of_quotes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not TOML: .*at line 1") as refused:
        parse(b"workload = lora\n", folder=tmp_path, default_name="job")
    assert 'name = "text"' in refused.value.hint
