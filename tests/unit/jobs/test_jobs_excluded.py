"""A folder input brings what the training needs: not the repository, not the environment, not what the job excludes."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.input_files import gather
from glasshouse.jobs.define.jobfile import parse
from glasshouse.jobs.define.private import ALWAYS_LEFT_OUT
from glasshouse.package.layout import MAGIC

JOB = """\
workload = "script"
[inputs]
"p" = "."
[params]
script = "p/train.py"
[policy]
assurance = "software"
profile = "standard"
[package]
exclude = {exclude}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for path in (
        "train.py",
        "src/model.py",
        "src/__pycache__/model.cpython-311.pyc",
        "src/.ipynb_checkpoints/a.ipynb",
        ".git/config",
        ".venv/lib/site.py",
        ".venv/lib/__pycache__/site.pyc",
        "tools/venv/bin/python",
        "web/node_modules/x/index.js",
        "web/index.html",
        "data/raw/a.csv",
        "data/a.csv",
        "data/a.tmp",
        "data/keep.tmp",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return tmp_path


def packed(folder: Path, *exclude: str, **inputs: str) -> tuple[list[str], list[str]]:
    gathered = gather(folder, inputs or {"p": "."}, exclude=exclude)
    return [source.path for source in gathered.sources], gathered.left_out


def test_what_no_training_needs_is_left_out_and_named(project: Path) -> None:
    paths, left_out = packed(project)
    assert paths == [
        "p/data/a.csv",
        "p/data/a.tmp",
        "p/data/keep.tmp",
        "p/data/raw/a.csv",
        "p/src/model.py",
        "p/train.py",
        "p/web/index.html",
    ]
    assert left_out == [
        ".git/",
        ".venv/",
        "src/.ipynb_checkpoints/",
        "src/__pycache__/",
        "tools/venv/",
        "web/node_modules/",
    ]
    assert {Path(path).name for path in left_out} == {pattern.rstrip("/") for pattern in ALWAYS_LEFT_OUT}


def test_a_linked_environment_and_a_worktrees_git_file_are_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").touch()
    (tmp_path / "work" / ".venv").symlink_to(tmp_path)
    (tmp_path / "work" / ".git").write_text("gitdir: elsewhere")
    assert packed(tmp_path / "work") == (["p/train.py"], [".git", ".venv"])


def test_a_job_excludes_by_gitignores_patterns_from_its_own_folder(project: Path) -> None:
    paths, left_out = packed(project, "*.tmp", "!keep.tmp", "/data/raw/", "web", "# a comment", "")
    assert paths == ["p/data/a.csv", "p/data/keep.tmp", "p/src/model.py", "p/train.py"]
    assert {"data/a.tmp", "data/raw/", "web/"} <= set(left_out)
    # From the job file's folder, whatever the input is called and wherever it begins.
    assert packed(project, "/data/raw/", "a.tmp", d="data")[0] == ["d/a.csv", "d/keep.tmp"]
    assert packed(project, "/raw/", d="data/raw")[0] == ["d/a.csv"]


def test_what_is_left_out_always_can_be_taken_back_or_named(project: Path) -> None:
    assert "p/.git/config" in packed(project, "!.git")[0]
    # Its own name is no reason to leave out what is asked for by that name; what lies in it is looked at.
    assert packed(project, site=".venv/lib") == (["site/site.py"], [".venv/lib/__pycache__/"])
    assert packed(project, env=".venv")[0] == ["env/lib/site.py"]
    assert packed(project, compiled="src/__pycache__/model.cpython-311.pyc")[0] == ["compiled"]


def test_no_pattern_takes_runs_back_and_an_excluded_home_is_no_obstacle(project: Path) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.owner_identity import Identity

    (project / ".glasshouse" / "runs").mkdir(parents=True)
    (project / ".glasshouse" / "runs" / "log").touch()
    assert ".glasshouse/" in packed(project, "!.glasshouse", "!*")[1]
    home = Home(path=project / "state").make()
    Identity.generate().save(private=home.owner_private, public=home.owner_public, passphrase=None)
    with pytest.raises(UsageError, match="private keys"):
        packed(project, "!state")
    assert "state/" in packed(project, "/state/")[1]


def test_an_input_of_which_nothing_is_left_says_why(project: Path) -> None:
    with pytest.raises(UsageError, match="no files but those that are left out") as refused:
        packed(project, "*")
    assert refused.value.code is Code.FILE_MISSING


def test_the_job_file_carries_the_patterns_and_a_wrong_one_is_named(project: Path) -> None:
    def job(exclude: str) -> tuple[str, ...]:
        return parse(JOB.format(exclude=exclude).encode(), folder=project, default_name="job").exclude

    assert job('["*.tmp", "!keep.tmp"]') == ("*.tmp", "!keep.tmp")
    assert job("[]") == ()
    for wrong, said in (('["!"]', "'!' is no gitignore pattern"), ('"*.tmp"', "a list"), ("[3]", "must be text")):
        with pytest.raises(UsageError, match=said) as refused:
            job(wrong)
        assert refused.value.code is Code.JOB_INVALID


def test_an_earlier_package_does_not_ride_in_the_next_one_unless_it_is_asked_for(project: Path) -> None:
    (project / "job.sealed").write_bytes(MAGIC + b"ciphertext")
    (project / "poem.sealed").write_bytes(b"lips")
    found = gather(project, {"p": "."})
    assert "job.sealed" in found.left_out
    assert {"p/job.sealed", "p/poem.sealed"} & {source.path for source in found.sources} == {"p/poem.sealed"}
    for asked in (
        gather(project, {"p": "."}, exclude=["!job.sealed"]),
        gather(project, {"p/job.sealed": "job.sealed"}),
    ):
        assert "p/job.sealed" in {source.path for source in asked.sources}
