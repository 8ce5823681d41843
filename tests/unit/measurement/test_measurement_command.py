"""`glasshouse bench overhead`: what is asked for wrongly is refused in a sentence, before a process is started."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.cli.options import OwnerOptions
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import Code, ExitCode, RunError, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse_bench import overhead
from glasshouse_bench.artifact import Part
from glasshouse_bench.design import Mode, Planted
from simulators.sealed_design import design
from simulators.slot_measurement import OWNER, measured

LORA = (
    'workload = "lora"\n[inputs]\n"train.jsonl" = "train.jsonl"\n'
    '[params]\ndata = "train.jsonl"\nmodel = "config:qwen2-tiny"\nmax_steps = 7\n'
    '[policy]\nassurance = "software"\nprofile = "standard"\n'
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "job.toml").write_text(LORA)
    return tmp_path / "job.toml"


def test_a_wish_is_two_parts_a_time_and_a_margin() -> None:
    wish = overhead.wish("interleaved", "10m", "0.5%", None)
    assert (list(wish.modes), wish.seconds, wish.margin, wish.planted) == (
        [Mode.INTERLEAVED, Mode.NULL],
        600,
        0.005,
        None,
    )
    assert list(overhead.wish("alternating", "2h", " 1 % ", None).modes) == [Mode.ALTERNATING]


@pytest.mark.parametrize(
    ("mode", "time", "margin", "planted", "why"),
    [
        ("fast", "10m", "1%", None, "--mode is one of interleaved, sequential, alternating, null, not 'fast'"),
        ("null", "ten", "1%", None, "--time takes a time such as 10m or 2h, not 'ten'"),
        ("null", "0m", "1%", None, "--time takes"),
        ("null", "-5m", "1%", None, "--time takes"),
        ("null", "10m", "0%", None, "--margin takes a percentage such as 1%, not '0%'"),
        ("null", "10m", "nan", None, "--margin takes"),
        ("null", "10m", "100%", None, "--margin takes"),
        ("interleaved", "10m", "1%", "2%", "--planted takes 2% or 2%,bunched, with --mode null"),
        ("null", "10m", "1%", "much", "--planted takes"),
    ],
)
def test_a_wish_that_is_none_names_its_option(mode: str, time: str, margin: str, planted: str | None, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        overhead.wish(mode, time, margin, planted)
    assert refused.value.message.startswith(why)


def test_what_is_planted_is_a_part_of_each_step_or_of_each_second() -> None:
    null = [Mode.NULL]
    assert overhead._planted("0.5%", null) == Planted(step_ppm=5_000, bunched_ns=0)
    assert overhead._planted("2%,bunched", null) == Planted(step_ppm=0, bunched_ns=20_000_000)
    assert overhead._planted(None, [Mode.INTERLEAVED]) is None


def test_the_built_in_job_is_made_in_its_folder(tmp_path: Path) -> None:
    subject = overhead.maker("mlp", None, None, "cpu")(tmp_path)
    assert (subject.job.workload, subject.job.params["device"], subject.job.folder) == ("mlp", "cpu", tmp_path)
    large = overhead.maker("lora", None, "config:qwen2.5-0.5b", None)(tmp_path)
    assert (large.job.name, large.job.params["device"]) == ("lora qwen2.5-0.5b", "auto")


def test_your_own_job_is_read_at_once_and_where_it_lies(job: Path, tmp_path: Path) -> None:
    make = overhead.maker("lora", job, None, "cpu")
    job.unlink()
    subject = make(tmp_path / "elsewhere")
    assert (subject.job.name, subject.job.folder, "max_steps" in subject.job.params) == ("job", tmp_path, False)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("vision", None, None, None), "--workload is one of mlp, lora, script"),
        (("mlp", None, None, "tpu"), "--device is one of auto, cpu, cuda"),
        (("script", None, None, None), "the workload script is your own"),
        (("lora", "JOB", "config:qwen2-tiny", None), "--model is for the built-in job"),
        (("mlp", "JOB", None, None), "a job of the workload lora, not mlp"),
    ],
)
def test_a_job_that_is_none_is_refused_before_anything_is_made(
    job: Path, options: tuple[str, str | None, str | None, str | None], why: str
) -> None:
    workload, own, model, device = options
    with pytest.raises(UsageError) as refused:
        overhead.maker(workload, None if own is None else job, model, device)
    assert why in refused.value.message


def test_without_torch_the_hint_is_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError) as refused:
        overhead.maker("mlp", None, None, None)
    assert (refused.value.code, "pip install" in refused.value.hint) == (Code.REQUIREMENT_MISSING, True)


def test_the_owner_is_the_one_of_the_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(path=tmp_path / "home").make()
    mine = Identity.generate()
    mine.save(private=home.owner_private, public=home.owner_public, passphrase=None)
    assert overhead.owner(OwnerOptions(home=home.path)).public == mine.public
    monkey = capsys.readouterr()
    assert monkey.err == monkey.out == ""


def test_a_home_that_was_named_and_has_no_owner_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no owner's identity") as refused:
        overhead.owner(OwnerOptions(home=tmp_path))
    assert refused.value.code is Code.IDENTITY


def test_without_a_home_a_key_is_made_and_what_that_means_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Home, "locate", lambda _path: Home(path=tmp_path / "none"))
    made = [overhead.owner(OwnerOptions()) for _ in range(2)]
    assert made[0].public != made[1].public
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be taken up again once it is interrupted" in said
    assert not (tmp_path / "none").exists(), "a key for one measurement is written nowhere"


@pytest.fixture
def identity() -> Identity:
    return Identity(signing=SigningKey(OWNER.seed()), sealing=RecipientKey.generate())


Closed = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def close(identity: Identity, capsys: pytest.CaptureFixture[str]) -> Closed:
    def closed(folder: Path, *, interrupted: bool = False) -> tuple[int, dict[str, Any]]:
        parts = [Part.open(folder, mode) for mode in (Mode.INTERLEAVED, Mode.NULL)]
        code = overhead.close(CommandOutput(True), folder, parts, identity, interrupted=interrupted)
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, told

    return closed


def test_what_was_measured_is_signed_verified_and_told(tmp_path: Path, close: Closed) -> None:
    folder = measured(tmp_path / "out", receipts=True, signed=False, sessions=3, length_ns=800_000_000)
    code, told = close(folder)
    assert (code, told["status"], told["interrupted"]) == (ExitCode.DONE, "good", False)
    assert (folder / "statement.json").is_file()


def test_what_was_interrupted_is_signed_as_incomplete_and_its_exit_code_says_so(tmp_path: Path, close: Closed) -> None:
    folder = measured(tmp_path / "out", receipts=True, signed=False, attempts=2, sessions=3, length_ns=800_000_000)
    code, told = close(folder, interrupted=True)
    assert (code, told["status"], told["interrupted"]) == (ExitCode.INTERRUPTED, "incomplete", True)
    assert "attempts" in told["lacks"]


def test_what_has_no_session_is_no_result(tmp_path: Path, close: Closed) -> None:
    for mode in (Mode.INTERLEAVED, Mode.NULL):
        Part.begin(tmp_path, design(mode))
    with pytest.raises(RunError, match="before its first session ended"):
        close(tmp_path, interrupted=True)
    assert not (tmp_path / "statement.json").exists()
