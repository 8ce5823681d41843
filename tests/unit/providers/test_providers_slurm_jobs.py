"""What Slurm's commands may answer beside what they should: nothing that fails is taken for a job that is not there."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.errors import Code, GlasshouseError, PlatformError
from glasshouse.providers.rental.provider import Offer, Options, Start, UncertainError
from glasshouse.providers.rental.slurm_jobs import Slurm

Answers = Callable[..., None]
OPTIONS = Options(
    gpu=(), gpus=0, memory_gb=0, disk_gb=1, regions=(), most_per_hour_usd=Decimal(0), spot=False, image=""
)
OFFER = Offer(
    id="main/", gpu="", gpus=0, gpu_memory_gb=0, memory_gb=1, disk_gb=1, region="main",
    usd_per_hour=Decimal(0), spot=False,
)  # fmt: skip
START = Start(tag="gh-me-1", nonce="ab" * 16, ssh_public="", ends_s=1200, ends_at_s=0, options=OPTIONS)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Have commands of these names answer as told."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))

    def answer(name: str, out: str = "", err: str = "", code: int = 0) -> None:
        for stream, text in (("out", out), ("err", err)):
            (tmp_path / f"{name}.{stream}").write_text(text)
        program = tmp_path / name
        program.write_text(
            f"#!/bin/sh\ncat >/dev/null\ncat {tmp_path}/{name}.out\ncat {tmp_path}/{name}.err >&2\nexit {code}\n"
        )
        program.chmod(0o700)

    return answer


@pytest.mark.parametrize(
    ("out", "err", "code"),
    [
        ("", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1),
        ("", "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1),
        ("", "Connection closed by remote host: invalid account", 255),
        ("", "something that this version does not know", 1),
        ("welcome to the cluster\n4711\n", "", 0),
        ("", "", 0),
    ],
)
def test_where_sbatch_does_not_name_a_job_there_may_be_one(answers: Answers, out: str, err: str, code: int) -> None:
    answers("sbatch", out, err, code)
    with pytest.raises(UncertainError):
        Slurm().rent(OFFER, START)


@pytest.mark.parametrize(
    "err",
    [
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy",
        "bash: line 1: sbatch: command not found",
    ],
)
def test_what_slurm_refuses_was_not_made(answers: Answers, err: str) -> None:
    answers("sbatch", "", err, 1)
    with pytest.raises(PlatformError) as refused:
        Slurm().rent(OFFER, START)
    assert refused.value.code is Code.NO_OFFER


def test_a_job_of_a_cluster_that_has_a_name_is_known_by_its_number(answers: Answers) -> None:
    answers("sbatch", "4711;fir\n")
    assert Slurm().rent(OFFER, START) == "4711"


@pytest.mark.parametrize(
    ("out", "err", "code", "expected"),
    [
        ("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1, "provider-unreachable"),
        ("", "ssh: connect to host login port 22: Connection refused", 255, "provider-unreachable"),
        ("", "me@login: Permission denied (publickey).", 255, "provider-key"),
        ("", "bash: squeue: command not found", 127, "provider-protocol"),
        ("4711 main gh-me-1", "", 0, "provider-protocol"),
    ],
)
def test_a_listing_that_failed_shows_the_absence_of_nothing(
    answers: Answers, out: str, err: str, code: int, expected: str
) -> None:
    answers("squeue", out, err, code)
    for ask in (lambda: Slurm().find("4711"), lambda: Slurm().tagged("gh-me-")):
        with pytest.raises(GlasshouseError) as raised:
            ask()
        assert raised.value.code.value == expected


def test_a_state_that_is_not_known_is_one_of_a_job_that_exists(answers: Answers) -> None:
    answers("squeue", "4711|SOMETHING_NEW|None|gh-me-1|with a bar\n12_[1-5]|PENDING|Priority|other\n")
    found = Slurm().find("4711")
    assert found is not None
    assert (found.state.value, found.tag) == ("stopped", "gh-me-1|with a bar")


def test_a_cancellation_that_failed_is_told_and_one_of_a_job_that_is_over_is_fine(answers: Answers) -> None:
    answers("scancel", "", "scancel: error: Kill job error on job id 4711: Invalid job id specified", 1)
    Slurm().give_back("4711")
    answers("scancel", "", "scancel: error: Kill job error on job id 4711: Access/permission denied", 1)
    with pytest.raises(GlasshouseError):
        Slurm().give_back("4711")


def test_what_a_node_printed_before_the_others_is_no_place_yet(answers: Answers, tmp_path: Path) -> None:
    (tmp_path / ".glasshouse-slurm-7.out").write_text("module loaded\nglasshouse-node a /tmp/x\n")
    assert Slurm(nodes=2).places("7") == ()
    with (tmp_path / ".glasshouse-slurm-7.out").open("a") as out:
        out.write("glasshouse-node b /tmp/x\n")
    assert Slurm("me@login:2222", nodes=2)._address == "me@login:2222"
    assert Slurm(nodes=2).places("7") == ("slurm:///7/a", "slurm:///7/b")
