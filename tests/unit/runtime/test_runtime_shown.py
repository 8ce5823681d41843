"""What the worker is shown of the machine: libraries and packages, and never an owner's state or a way to a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasshouse.attestation.hardening import CheckResult
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime import sandbox, shown
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.surroundings import default_read_paths
from tools.machine import WithoutNamespaces, needs_filters, needs_landlock, needs_namespaces
from tools.sandboxed import run, specification, start

pytestmark = needs_filters


@contextmanager
def listening(path: Path) -> Iterator[None]:
    """Listen at a Unix socket, by a name that its address can hold."""
    before = Path.cwd()
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)
        try:
            listener.bind(str(path) if len(str(path)) < 100 else path.name)
        finally:
            os.chdir(before)
        listener.listen()
        yield
    path.unlink()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An editable install whose `.pth` file names the whole project, with the owner's state beside the package."""
    root = tmp_path / "project"
    for name in ("ours/inner", "space/nested", ".glasshouse/broker", "tests", "data", "ours.egg-info"):
        (root / name).mkdir(parents=True)
    for name in ("ours/__init__.py", "ours/inner/__init__.py", "space/nested/__init__.py"):
        (root / name).write_text("answer = 42\n")
    for name in ("setup.py", "tests/conftest.py"):
        (root / name).touch()
    (root / ".glasshouse" / "owner.key").write_text("the owner's")
    (root / "data" / "train.csv").write_text("the owner's")
    monkeypatch.syspath_prepend(str(root))
    return root


def of(folder: Path) -> set[str]:
    return {path.removeprefix(f"{folder}/") for path in default_read_paths() if path.startswith(str(folder))}


def test_of_an_editable_install_the_packages_are_shown_and_not_the_project(project: Path) -> None:
    assert of(project) == {"ours", "ours.egg-info", "space/nested", "setup.py"}


@needs_namespaces
@needs_landlock
def test_a_script_imports_the_package_and_does_not_see_the_owners_key_or_broker(project: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(project)!r})
import ours.inner, space.nested
print(ours.inner.answer, space.nested.answer, sorted(os.listdir({str(project)!r})))
"""
    with listening(project / ".glasshouse" / "broker" / "owner.sock"):
        ran = run(code)
    assert ran.output == "42 42 ['ours', 'ours.egg-info', 'setup.py', 'space']\n"
    assert ran.report.observed["egress-closed"] is CheckResult.PASSED


@needs_landlock
def test_a_script_imports_the_package_also_where_there_is_no_private_root(project: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(project)!r})
import ours.inner, space.nested
print(ours.inner.answer, space.nested.answer)
for name in ('data/train.csv', '.glasshouse/owner.key'):
    try:
        print(open({str(project)!r} + '/' + name).read())
    except OSError as error:
        print(type(error).__name__)
"""
    ran = run(code, kernel=WithoutNamespaces())
    assert ran.output == "42 42\nPermissionError\nPermissionError\n"


def test_packages_of_an_editable_install_that_lie_apart_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apart").mkdir()
    finder = types.ModuleType("__editable___apart_1_0_finder")
    finder.MAPPING = {"apart": str(tmp_path / "apart")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    assert of(tmp_path) == {"apart"}


def test_of_an_environment_in_a_projects_folder_the_project_is_not_shown(tmp_path: Path) -> None:
    # `python -m venv .`: the prefix is the project.
    for name in ("bin", "lib", "include", ".glasshouse", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    asked = "import sys; sys.prefix = sys.argv[1]\nfrom glasshouse.runtime.surroundings import *\n"
    asked += "print(*[path for path in default_read_paths() if path.startswith(sys.prefix)])"
    words = [sys.executable, "-c", asked, str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert {Path(path).name for path in said} == {"bin", "include", "lib", "pyvenv.cfg"}


@pytest.mark.parametrize("place", ["/", "/root", "/home"])
def test_a_link_on_the_search_path_that_leads_to_a_home_or_the_machine_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    link = tmp_path / "site-packages"
    link.symlink_to(place)
    monkeypatch.syspath_prepend(str(link))
    assert str(link) not in default_read_paths()
    with pytest.raises(ValueError, match="cannot show"):
        specification("pass", read_paths=(str(link),))


def test_keys_of_the_systems_own_services_are_not_shown() -> None:
    paths = default_read_paths()
    assert not [path for path in paths if "/etc/ssl/private/key".startswith(path.rstrip("/") + "/")]


# refused before anything is started


@pytest.mark.parametrize("place", ["ours", "ours/inner"])
def test_a_run_in_a_folder_that_is_shown_is_refused(project: Path, place: str) -> None:
    with pytest.raises(PlatformError) as caught:
        specification("pass", read_paths=default_read_paths(), hidden=(str(project / place / "runs" / "out"),))
    assert caught.value.code is Code.PLATFORM
    specification("pass", read_paths=default_read_paths(), hidden=(str(project / ".glasshouse" / "out"),))


def test_a_socket_of_another_process_is_found_however_deep_it_lies(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c" / "s"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    with listening(deep):
        assert shown.bound_beneath(REAL, (str(tmp_path / "a" / "b"),)) == [str(deep)]
        assert shown.bound_beneath(REAL, (str(link),)) == [str(deep)]
        assert shown.bound_beneath(REAL, (str(tmp_path / "a" / "bc"),)) == []
        with pytest.raises(PlatformError) as caught:
            start(specification("pass", read_paths=(*default_read_paths(), str(tmp_path))))
        assert caught.value.code is Code.PLATFORM
    assert shown.bound_beneath(REAL, (str(tmp_path),)) == []


# tried from inside


class WithoutList(type(REAL)):  # type: ignore[misc]
    """A machine on which a socket was bound in another network namespace: no list here names it."""

    def read(self, path: str) -> bytes:
        return b"Num ...\n" if path == "/proc/net/unix" else super().read(path)  # type: ignore[no-any-return]


@needs_namespaces
def test_a_socket_that_no_list_names_is_found_from_inside_and_egress_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "REAL", WithoutList())
    monkeypatch.setattr(shown, "bound_beneath", lambda *_: [])
    with listening(tmp_path / "package" / "s"):
        ran = run("pass", read_paths=(*default_read_paths(), str(tmp_path)))
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "open-shown-socket" in ran.report.notes
    assert f"a socket: {tmp_path}/package/s" in ran.errors


@needs_namespaces
@pytest.mark.parametrize("name", [".glasshouse/", "owner.key", "broker.key"])
def test_an_owners_state_beneath_what_is_shown_is_found_from_inside(tmp_path: Path, name: str) -> None:
    place = tmp_path / "package" / "deeper" / name
    place.parent.mkdir(parents=True)
    place.mkdir() if name.endswith("/") else place.touch()
    ran = run("pass", read_paths=(*default_read_paths(), str(tmp_path)))
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "open-shown-state" in ran.report.notes


def test_where_no_socket_can_be_called_by_name_one_that_is_seen_is_no_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "bound_beneath", lambda *_: [])
    with listening(tmp_path / "s"):
        ran = run("pass", kernel=WithoutNamespaces(), read_paths=(*default_read_paths(), str(tmp_path)))
    assert ran.report.observed["egress-closed"] is CheckResult.PASSED


def test_the_search_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"folder-{number}").mkdir()
        (tmp_path / f"folder-{number}" / "file").touch()
    assert shown.search([str(tmp_path)], limit=40) == ([], True)
    assert shown.search([str(tmp_path)], limit=39) == ([], False)
    with listening(tmp_path / "s"):
        assert shown.search(["/usr", str(tmp_path)], limit=30) == ([("socket", f"{tmp_path}/s")], False)
        assert shown.search([f"{tmp_path}/folder-1", str(tmp_path)], limit=99) == ([("socket", f"{tmp_path}/s")], True)
        assert shown.search([f"{tmp_path}/s"], limit=1) == ([("socket", f"{tmp_path}/s")], True)
