"""An owner's state is not shown to a worker, by whatever line of a `.pth` file, link or name it would come in."""

from __future__ import annotations

import site
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.jobs.define.private import is_state
from glasshouse.runtime.confine import shown_search
from glasshouse.runtime.worker.shown_paths import default_read_paths
from tools.machine import WithoutNamespaces, needs_filters, needs_landlock, needs_namespaces
from tools.sandboxed import run

pytestmark = needs_filters

OWNERS_KEY, PACKAGE_KEY = '{"kind":"glasshouse-owner-private"}', '{"kind":"glasshouse-package-key"}'
BROKERS_KEY = f"glasshouse-broker-key-v1 {'A' * 43}\n"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], None]:
    """Put a path on the search path as the interpreter does at its start: by a line of a `.pth` file."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def name(place: Path) -> None:
        (tmp_path / "lines").mkdir()
        (tmp_path / "lines" / "one.pth").write_text(f"{place}\n")
        site.addsitedir(str(tmp_path / "lines"))
        assert str(place) in sys.path

    return name


@pytest.mark.parametrize("name", ["owner.key", "customers.csv", "site-packages"])
def test_a_line_of_a_pth_file_that_names_a_file_does_not_show_it(
    tmp_path: Path, named: Callable[[Path], None], name: str
) -> None:
    secret = tmp_path / "home" / name
    secret.parent.mkdir()
    secret.write_text("the owner's")
    named(secret)
    assert str(secret) not in default_read_paths()


def test_an_archive_of_modules_that_a_pth_file_names_is_shown(tmp_path: Path, named: Callable[[Path], None]) -> None:
    archive = tmp_path / "modules.egg"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("ours.py", "answer = 42\n")
    named(archive)
    assert str(archive) in default_read_paths()


@needs_landlock
def test_where_nothing_can_be_mounted_a_file_on_the_search_path_costs_no_landlock(
    tmp_path: Path, named: Callable[[Path], None]
) -> None:
    secret = tmp_path / "customers.csv"
    secret.write_text("the owner's")
    named(secret)
    code = f"""
try:
    print(open({str(secret)!r}).read())
except OSError as error:
    print(type(error).__name__)
"""
    ran = run(code, kernel=WithoutNamespaces())
    assert ran.report.observed["landlock"] is CheckResult.PASSED
    assert ran.output == "PermissionError\n"


@needs_namespaces
def test_a_link_called_site_packages_that_leads_to_a_state_home_is_found_from_inside(
    tmp_path: Path, named: Callable[[Path], None]
) -> None:
    link = tmp_path / "other" / "site-packages"
    state = tmp_path / "project" / ".glasshouse"
    for folder in (link.parent, state):
        folder.mkdir(parents=True)
    (state / "notes.txt").write_text("the owner's")
    link.symlink_to(state)
    named(link)
    assert str(link) in default_read_paths()
    ran = run("pass", read_paths=default_read_paths())
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "open-shown-state" in ran.report.notes
    assert f"a state: {link}" in ran.errors


@pytest.mark.parametrize(
    ("place", "leads_to"),
    [
        (".glasshouse", None),
        (".glasshouse/runs/customer/package", None),
        ("home/owner.key", None),
        ("home/broker.key", None),
        (f"home/runs/{'0a' * 16}", None),
        (f"home/runs/{'0a' * 16}/outputs/package", None),
        ("site-packages", ".glasshouse"),
        ("site-packages", ".glasshouse/cache/package"),
        ("module.py", "home/owner.key"),
        (".glasshouse/link", "package"),
    ],
)
def test_a_shown_path_that_is_a_state_home_lies_in_one_or_links_into_one_is_state(
    tmp_path: Path, place: str, leads_to: str | None
) -> None:
    record = tmp_path / "home" / "runs" / ("0a" * 16) / "run.json"
    record.parent.mkdir(parents=True)
    record.touch()
    path, real = tmp_path / place, tmp_path / (leads_to or place)
    for one in (path, real):
        one.parent.mkdir(parents=True, exist_ok=True)
    if not real.is_dir():
        real.touch() if real.suffix in (".key", ".py") else real.mkdir()
    if leads_to:
        path.symlink_to(real)
    found, whole = shown_search.search([str(path)])
    assert ("state", str(path)) in found
    assert whole


@pytest.mark.parametrize("text", [OWNERS_KEY, PACKAGE_KEY, BROKERS_KEY])
def test_a_shown_file_that_is_a_key_of_ours_is_state_under_any_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    (tmp_path / "other.py").write_text(f"said = '{text.strip()}'\n")
    assert shown_search.search([f"{tmp_path}/module.py", f"{tmp_path}/other.py"]) == (
        [("state", f"{tmp_path}/module.py")],
        True,
    )


def test_what_is_left_of_a_home_without_the_owners_key_is_state_to_the_look_as_to_sealing(tmp_path: Path) -> None:
    records = {f"runs/{'0a' * 16}/run.json", "keys/ID.json", "broker/data/copy"}
    others = {"runs/latest/run.json", "runs/run.json", f"{'0a' * 16}/run.json", "keys/other.json", "data/copy"}
    for name in records | others:
        place = tmp_path / "package" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text('{"kind":"other"}' if name == "keys/other.json" else PACKAGE_KEY)
    found, whole = shown_search.search([str(tmp_path)])
    assert (set(found), whole) == ({("state", f"{tmp_path}/package/{name}") for name in records}, True)
    assert is_state(tmp_path / "package")
