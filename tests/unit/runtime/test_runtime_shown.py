"""What the worker is shown of the machine: libraries and packages, and never an owner's state or a way to a process."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.confine import shown_search
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.worker import sandbox, shown_paths
from glasshouse.runtime.worker.shown_paths import default_read_paths
from tools.forked import in_child
from tools.machine import (
    WithoutMounts,
    WithoutNamespaces,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
)
from tools.sandboxed import run, specification, start

pytestmark = needs_filters


@pytest.fixture(autouse=True)
def searched_once() -> None:
    """Not here, where the search is what is tested."""


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
    for name in ("bin", "lib", "include", ".glasshouse", "data", "libexec", "share", "ssl", "targets"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    assert _of_a_prefix(tmp_path) == {"bin", "include", "lib", "pyvenv.cfg"}


def test_of_condas_own_folder_what_its_toolkits_need_is_shown(tmp_path: Path) -> None:
    for name in ("bin", "lib", "conda-meta", "data", "libexec", "share", "ssl", "targets"):
        (tmp_path / name).mkdir()
    assert _of_a_prefix(tmp_path) == {"bin", "lib", "libexec", "share", "ssl", "targets"}


def _of_a_prefix(folder: Path) -> set[str]:
    """Return what is shown of an interpreter's or environment's folder."""
    asked = "import sys; sys.prefix = sys.argv[1]\nfrom glasshouse.runtime.worker.shown_paths import *\n"
    asked += "print(*[path for path in default_read_paths() if path.startswith(sys.prefix)])"
    words = [sys.executable, "-c", asked, str(folder)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return {Path(path).name for path in said}


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
        assert shown_search.bound_beneath(REAL, (str(tmp_path / "a" / "b"),)) == [str(deep)]
        assert shown_search.bound_beneath(REAL, (str(link),)) == [str(deep)]
        assert shown_search.bound_beneath(REAL, (str(tmp_path / "a" / "bc"),)) == []
        with pytest.raises(PlatformError) as caught:
            start(specification("pass", read_paths=(*default_read_paths(), str(tmp_path))))
        assert caught.value.code is Code.PLATFORM
    assert shown_search.bound_beneath(REAL, (str(tmp_path),)) == []


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
    monkeypatch.setattr(shown_search, "bound_beneath", lambda *_: [])
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
    monkeypatch.setattr(shown_search, "bound_beneath", lambda *_: [])
    with listening(tmp_path / "s"):
        ran = run("pass", kernel=WithoutNamespaces(), read_paths=(*default_read_paths(), str(tmp_path)))
    assert ran.report.observed["egress-closed"] is CheckResult.PASSED


def test_everything_is_looked_at_however_much_lies_beside_it_and_however_deep(tmp_path: Path) -> None:
    deep = tmp_path / "site" / "a" / "b" / "c"
    for folder in (tmp_path / "fonts", deep):
        folder.mkdir(parents=True)
    for number in range(4_000):
        (tmp_path / "fonts" / f"{number}.ttf").touch()
    (deep / "owner.key").touch()
    os.mkfifo(deep / "pipe")
    (tmp_path / "link").symlink_to(deep)
    with listening(deep / "s"):
        for paths, top in (
            ([str(tmp_path)], deep),
            ([str(deep), str(tmp_path)], deep),
            ([f"{tmp_path}/link"], tmp_path / "link"),
        ):
            seen, whole = shown_search.search(paths)
            found = [("pipe", f"{top}/pipe"), ("socket", f"{top}/s"), ("state", f"{top}/owner.key")]
            assert (sorted(seen), whole) == (found, True)
        assert shown_search.search([f"{deep}/s", f"{deep}/gone"]) == ([("socket", f"{deep}/s")], True)


def test_a_search_that_does_not_come_to_its_end_says_so(tmp_path: Path) -> None:
    assert shown_search.search([str(tmp_path)], give_up_s=0) == ([], False)


def test_a_path_too_deep_for_a_name_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    def act() -> tuple[list[tuple[str, str]], bool]:
        os.chdir(tmp_path)
        for _ in range(20):
            os.mkdir("n" * 250)  # noqa: PTH102 - by a name that no call takes as a whole
            os.chdir("n" * 250)
        return shown_search.search([str(tmp_path)])

    try:
        assert in_child(act) == ([], False)
    finally:
        shutil.rmtree(tmp_path)


def _meanwhile(monkeypatch: pytest.MonkeyPatch, folder: Path, act: Callable[[], None]) -> None:
    """Let another process do something once, between the listing of a folder's name and its opening."""
    look, acts = os.scandir, [act]

    def scandir(path: str) -> object:
        if path == str(folder) and acts:
            acts.pop()()
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)


def _exchanged_for_a_file(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


def _exchanged_for_a_link_to_itself(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(folder.name)


def _stale(_folder: Path) -> None:
    raise OSError(errno.ESTALE, "as of a network file system")


@pytest.mark.parametrize(
    "act",
    [Path.rmdir, _exchanged_for_a_file, _exchanged_for_a_link_to_itself, _stale],
    ids=["removed", "a file", "a link to itself", "stale"],
)
def test_a_folder_that_goes_while_it_is_looked_for_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    _meanwhile(monkeypatch, folder, lambda: act(folder))
    assert shown_search.search([str(tmp_path)]) == ([], True)


def test_a_folder_that_is_put_in_the_place_of_another_in_that_moment_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def act() -> None:
        (folder / "owner.key").touch()
        raise FileNotFoundError(errno.ENOENT, "as between the removal of one and the coming of the other")

    _meanwhile(monkeypatch, folder, act)
    assert shown_search.search([str(tmp_path)]) == ([("state", f"{folder}/owner.key")], True)


def test_where_another_process_makes_and_removes_folders_all_the_time_every_look_comes_to_its_end(
    tmp_path: Path,
) -> None:
    code = """
import os, shutil, sys
print(flush=True)
while True:
    for name in ('a', 'b', 'c'):
        place = f'{sys.argv[1]}/{name}'
        os.makedirs(f'{place}/deep/er')
        open(f'{place}/deep/file', 'w').close()
        os.rename(f'{place}/deep', f'{place}/deeper')
        shutil.rmtree(place)
        os.symlink('nowhere', place)
        os.unlink(place)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert [shown_search.search([str(tmp_path)]) for _ in range(500)] == 500 * [([], True)]
        finally:
            other.kill()


@needs_root
def test_a_folder_that_can_be_passed_through_but_not_read_is_named(tmp_path: Path) -> None:
    _let_in(tmp_path)
    for name, mode in (("passed", 0o711), ("shut", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.key").touch()
        (tmp_path / name).chmod(mode)
    found = in_child(lambda: shown_search.search([str(tmp_path)]), user=65534)
    assert found == ([("closed", f"{tmp_path}/passed")], True)


@needs_root
@needs_namespaces
def test_what_cannot_be_looked_into_is_covered_and_where_nothing_can_be_mounted_the_check_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passed").mkdir()
    (tmp_path / "passed" / "known.txt").write_text("the owner's")
    look = shown_search.search

    def search(paths: list[str]) -> tuple[list[tuple[str, str]], bool]:
        found, whole = look(paths)
        return [*found, ("closed", f"{tmp_path}/passed")], whole

    monkeypatch.setattr(shown_search, "search", search)  # as for a user who may not read that folder
    code = f"""
try:
    print(open('{tmp_path}/passed/known.txt').read())
except OSError as error:
    print(type(error).__name__)
"""
    paths = (*default_read_paths(), str(tmp_path))
    ran = run(code, kernel=type(REAL)(), read_paths=paths)
    assert ran.report.observed["egress-closed"] is CheckResult.PASSED
    assert ran.output == "FileNotFoundError\n"
    ran = run(code, kernel=WithoutMounts(), read_paths=paths)
    assert ran.report.observed["egress-closed"] is CheckResult.UNAVAILABLE
    assert "shown-searched-in-part" in ran.report.notes


def test_where_the_search_has_no_end_egress_is_not_called_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_search, "search", lambda _paths: ([], False))
    ran = run("pass", kernel=type(REAL)())
    assert ran.report.observed["egress-closed"] is CheckResult.UNAVAILABLE
    assert "shown-searched-in-part" in ran.report.notes


@needs_namespaces
def test_a_socket_bound_by_a_relative_name_and_a_key_deep_in_a_large_tree_are_found_from_inside(tmp_path: Path) -> None:
    deep = tmp_path / "lib" / "environment" / "x"
    for folder in (tmp_path / "fonts", deep):
        folder.mkdir(parents=True)
    for number in range(4_000):
        (tmp_path / "fonts" / f"{number}.ttf").touch()
    (deep / "owner.key").write_text("the owner's")
    before = Path.cwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(deep)
        try:
            listener.bind("app.sock")
        finally:
            os.chdir(before)
        listener.listen()
        ran = run("pass", read_paths=(*default_read_paths(), str(tmp_path)))
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert {"open-shown-socket", "open-shown-state"} <= set(ran.report.notes)
    assert f"a socket: {deep}/app.sock" in ran.errors


@needs_namespaces
@needs_landlock
def test_a_pipe_with_a_name_beneath_what_is_shown_is_a_way_out(tmp_path: Path) -> None:
    # What is shown in /tmp lies in a folder that the worker may write to; the mount stops files, not pipes.
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        ran = run("pass", read_paths=(*default_read_paths(), str(tmp_path)))
    finally:
        os.close(reader)
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "open-shown-pipe" in ran.report.notes


@needs_root
@needs_namespaces
def test_state_that_the_workers_user_cannot_open_is_no_reason_to_refuse(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / ".glasshouse").mkdir(parents=True)
    (other / ".glasshouse" / "owner.key").touch()
    os.chown(other, 65534, 65534)
    other.chmod(0o700)
    ran = run("pass", read_paths=(*default_read_paths(), str(tmp_path)))
    assert ran.report.observed["egress-closed"] is CheckResult.PASSED


def _let_in(folder: Path) -> None:
    """Let every user pass through to a folder of this test's."""
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent.stat().st_uid == os.geteuid() and parent.stat().st_mode & 0o7777 == 0o700:
            parent.chmod(0o711)


@needs_landlock
@needs_namespaces
@pytest.mark.parametrize("deep", [False, True], ids=["the link is shown", "what lies beneath it is shown"])
def test_what_is_shown_by_a_link_is_looked_at_by_the_name_that_the_worker_sees(tmp_path: Path, deep: bool) -> None:
    models = tmp_path / "disk" / "hub" / "models"
    models.mkdir(parents=True)
    os.mkfifo(models / "pipe")
    (models / "owner.key").write_text("a key")
    (tmp_path / "cache").symlink_to(tmp_path / "disk" / "hub")
    place = tmp_path / "cache" / "models" if deep else tmp_path / "cache"
    ran = run("pass", read_paths=(*specification("").read_paths, str(place)))
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert {"open-shown-pipe", "open-shown-state"} <= set(ran.report.notes)


def test_a_worker_gets_its_gpus_and_nothing_of_what_else_their_driver_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ["nvidia-caps", "nvidia-caps-imex-channels", "nvidia-uvm", "nvidia0", "nvidiactl", "sda"]
    nodes += [
        "nvidia-fs0",
        "nvidia-modeset",
        "nvidia-nvlink",
        "nvidia-nvswitch0",
        "nvidia-nvswitchctl",
        "nvidia-uvm-tools",
    ]
    monkeypatch.setattr(os, "listdir", lambda _folder: nodes)
    given = [path for path in shown_paths.default_devices() if "nvidia" in path]
    assert given == ["/dev/nvidia-caps", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]
