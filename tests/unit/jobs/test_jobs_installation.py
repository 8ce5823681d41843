"""What a hint installs is this project, for the interpreter at hand: the index has somebody else's `glasshouse`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

import glasshouse
from glasshouse.jobs.owner import installation
from glasshouse.jobs.owner.installation import DISTRIBUTION, beside, install_command

ROOT = Path(__file__).resolve().parents[3]


class Installed:
    """A distribution as pip leaves it; `direct_url.json` is there for what came from a folder (PEP 610)."""

    def __init__(self, origin: str | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        return self.origin if name == "direct_url.json" else None


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation in site-packages: nothing of ours lies beside it."""
    monkeypatch.setattr(glasshouse, "__file__", str(tmp_path / "lib" / "site-packages" / "glasshouse" / "__init__.py"))
    monkeypatch.setattr(installation, "_python", lambda: "python")
    return tmp_path


def installed_from(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))


def test_a_checkout_installs_itself_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_python", lambda: "python")
    monkeypatch.chdir(ROOT)
    assert install_command() == "python -m pip install -e '.[train]'"
    monkeypatch.chdir(tmp_path)
    assert install_command() == f"python -m pip install -e '{ROOT}[train]'"
    assert beside("bench", "glasshouse-train-bench") == f"python -m pip install -e {ROOT}/bench"


def test_what_came_from_the_index_is_called_by_its_name_there(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from(monkeypatch, None)
    assert install_command() == "python -m pip install 'glasshouse-train[train]'"
    assert beside("bench", "glasshouse-train-bench") == "python -m pip install glasshouse-train-bench"


def test_what_was_installed_from_a_folder_is_installed_from_there(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = elsewhere / "the sources"
    folder.mkdir()
    installed_from(monkeypatch, json.dumps({"url": folder.as_uri(), "dir_info": {}}))
    named = "python -m pip install 'glasshouse-train[train]'"
    assert install_command() == named  # the sources are gone
    (folder / "pyproject.toml").write_text('[project]\nname = "glasshouse"\n')
    assert install_command() == named  # somebody else's
    shutil.copy(ROOT / "pyproject.toml", folder)
    assert install_command() == f"python -m pip install '{folder}[train]'"


@pytest.mark.parametrize("origin", ["", "{", "[]", "{}", '{"url": 3}', '{"url": "https://x.example/a.whl"}'])
def test_an_origin_that_is_none_is_passed_over(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    installed_from(monkeypatch, origin)
    assert install_command() == "python -m pip install 'glasshouse-train[train]'"
    assert beside("bench", "glasshouse-train-bench") == "python -m pip install glasshouse-train-bench"


def test_nothing_that_is_installed_at_all(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Installed:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", none)
    assert install_command() == "python -m pip install 'glasshouse-train[train]'"
    assert beside("bench", "glasshouse-train-bench") == "python -m pip install glasshouse-train-bench"


def test_the_interpreter_at_hand_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python3")
    assert install_command().startswith("'/opt/my python/bin/python3' -m pip install ")
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable if name == "python3" else None)
    assert install_command().startswith("python3 -m pip install ")


def test_the_name_is_that_of_the_distribution_and_no_page_or_hint_names_the_strangers() -> None:
    assert f'name = "{DISTRIBUTION}"' in (ROOT / "pyproject.toml").read_text()
    pages = [
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.sh")]
    stranger = re.compile(r"pip install[^\n`]*?[ '\"]glasshouse(?![-_/])")
    assert len(pages) > 5
    assert [path for path in (*pages, *sources) if stranger.search(path.read_text())] == []
