"""The runtime measurement: the same everywhere, and different as soon as code that could touch a key is."""

from __future__ import annotations

import hashlib
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import cryptography
import pytest

import glasshouse
from glasshouse.attestation.measurements import measurement
from glasshouse.attestation.measurements.measured import PARTS, Measured
from glasshouse.attestation.measurements.measurement import measure_environment, measure_runtime, measured_files
from glasshouse.errors import Code, PlatformError

STDLIB = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PRINT = """
from glasshouse.attestation.measurements.measurement import measure_environment, measure_runtime
print(measure_runtime().sha256.hex(), measure_environment().hex())
"""


def test_the_owner_and_the_runtime_measure_the_same(tmp_path: Path) -> None:
    """An ordinary interpreter, with a poisoned path and variables, against one started as the agent is."""
    (tmp_path / "caches").mkdir()
    (tmp_path / "sitecustomize.py").write_text("")  # of the owner's own path, which the runtime never looks at
    agent = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={tmp_path / 'caches'}", "-c", _PRINT]
    ordinary = [sys.executable, "-c", _PRINT]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    ours = f"{measure_runtime().sha256.hex()} {measure_environment().hex()}\n"
    for command in (agent, ordinary):
        told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert told.stdout == ours


def test_each_part_covers_what_is_trusted_with_keys() -> None:
    files = measured_files()
    names = {part: set(files[part]) for part in files}
    assert tuple(names) == PARTS
    assert files["interpreter"]["python"] == hashlib.sha256(Path(sys.executable).resolve().read_bytes()).digest()
    assert {"glasshouse/runtime/__init__.py", "glasshouse/wire/crypto.py"} <= names["glasshouse"]
    assert "stdlib/hashlib.py" in names["interpreter"]
    for package in ("cryptography/", "blake3/", "_cffi_backend."):
        assert any(name.startswith(package) and name.endswith(".so") for name in names["cryptography"])
    assert any(name.startswith("stdlib/lib-dynload/") and name.endswith(".so") for name in names["interpreter"])
    assert not any("__pycache__" in name or "site-packages" in name for part in names for name in names[part])
    for directory in site.getsitepackages():
        for listing in Path(directory).glob("*.pth"):
            counts = hashlib.sha256(listing.read_bytes()).digest() in files["start_up"].values()
            assert counts is (b"import " in listing.read_bytes())


def test_every_module_that_the_protocol_loads_is_measured(tmp_path: Path) -> None:
    """A module that came from anywhere else would be code with keys in reach that nobody judged."""
    code = """
import sys
import glasshouse.handshake.runtime_side, glasshouse.handshake.broker_side
import glasshouse.attestation.measurements.measurement
import glasshouse.package.grant, glasshouse.evidence.log, glasshouse.wire.crypto
for name, module in sorted(sys.modules.items()):
    path = getattr(module, "__file__", None)
    if path and name != "__main__": print(path)
"""
    command = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={tmp_path}", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    measured = {os.path.realpath(path) for _, _, path in measurement._places(measurement._running())}
    assert [path for path in loaded if path and os.path.realpath(path) not in measured] == []
    assert len(loaded) > 50


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small installation of our own to poison: packages, standard library, site directory."""
    for name in ("glasshouse", "cryptography", "blake3", STDLIB):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "code.py").write_text("genuine = True\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "helper").mkdir()
    (tmp_path / "site" / "helper" / "__init__.py").write_text("")
    (tmp_path / "site" / "start.pth").write_text("# comment\n/nowhere\nimport helper; helper.start()\n")
    (tmp_path / "site" / "torch-2.dist-info").mkdir()
    (tmp_path / "site" / "torch-2.dist-info" / "RECORD").write_text("torch/__init__.py,sha256=abc,0\n")
    monkeypatch.setattr(glasshouse, "__file__", str(tmp_path / "glasshouse" / "__init__.py"))
    monkeypatch.setattr(cryptography, "__file__", str(tmp_path / "cryptography" / "__init__.py"))
    _modules_in(monkeypatch, tmp_path)
    monkeypatch.setattr(measurement.os, "__file__", str(tmp_path / STDLIB / "os.py"))
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
    return tmp_path


def _modules_in(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    def module(name: str) -> str | None:
        found = {"blake3": root / "blake3" / "__init__.py", "_cffi_backend": root / "site" / "_cffi_backend.so"}[name]
        return str(found) if found.exists() else None

    monkeypatch.setattr(measurement, "_module", module)


def _write(path: str, text: str = "import os\n") -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return apply


def _link(path: str, target: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        _write(f"{target}/__init__.py")(root)
        (root / path).symlink_to(root / target)

    return apply


@pytest.mark.parametrize(
    ("part", "poison"),
    [
        ("glasshouse", _write("glasshouse/code.py", "genuine = False\n")),
        ("cryptography", _write("cryptography/code.py", "genuine = False\n")),
        ("cryptography", _write("blake3/code.py", "genuine = False\n")),  # sees the plaintext of every asset
        ("cryptography", _write("site/_cffi_backend.so")),
        ("interpreter", _write(f"{STDLIB}/code.py", "genuine = False\n")),
        # An extension is found before the source, and so is a package of the same name, also behind a link.
        ("glasshouse", _write("glasshouse/code.cpython-311-x86_64-linux-gnu.so")),
        ("glasshouse", _write("glasshouse/code/__init__.py")),
        ("glasshouse", _link("glasshouse/code", "elsewhere")),
        ("interpreter", _write(f"{STDLIB}/json.pyc")),  # byte code without a source, beside it
        ("interpreter", _write(f"{STDLIB.replace('.', '')}.zip")),  # comes before the standard library
        ("interpreter", _write(f"lib{STDLIB}.so.1.0")),
        ("start_up", _write("site/evil.pth", "import os\n")),
        ("start_up", _write("site/evil.pth", "import\tos\n")),
        ("start_up", _write("site/evil.pth", "\ufeffimport os\n")),  # some versions read over the mark
        ("start_up", _write("site/evil.pth", "/nowhere\x0cimport os\n")),  # and end a line there
        ("start_up", _write("site/start.pth", "import helper; helper.other()\n")),
        ("start_up", _write("site/start.pth", "# comment\n/nowhere\nimport helper;\x0chelper.other()\n")),
        ("start_up", _write("site/helper/__init__.py", "stolen = True\n")),  # what a .pth line imports
        ("start_up", _write("site/helper.py")),
        ("start_up", _write("site/sitecustomize.py")),
        ("start_up", _write("site/usercustomize/__init__.py")),
        ("start_up", _write("site/org/python/core.py")),  # `copy` of the standard library asks for it
        ("start_up", _write("site/msvcrt.py")),  # a name of the standard library that this build does not have
    ],
)
def test_poison_changes_its_part_alone(installation: Path, part: str, poison: Callable[[Path], None]) -> None:
    before = measure_runtime()
    assert measure_runtime() == before
    poison(installation)
    after = measure_runtime()
    assert {name for name in PARTS if after.parts()[name] != before.parts()[name]} == {part}
    assert after.sha256 != before.sha256


def test_a_hook_in_the_standard_library_is_both(installation: Path) -> None:
    before = measure_runtime()
    _write(f"{STDLIB}/sitecustomize.py")(installation)
    after = measure_runtime()
    assert after.interpreter != before.interpreter
    assert after.start_up != before.start_up


@pytest.mark.parametrize(
    "listing",
    ["/srv/projects/one/src\n", "../elsewhere\n# note\n", "added\n.\n../site\n", ""],
    ids=["an editable installation", "relative", "itself again", "nothing"],
)
def test_a_path_in_a_pth_file_does_not_count(installation: Path, listing: str) -> None:
    """Two installations of the same files, one of them editable, measure the same."""
    _write("site/sitecustomize.py")(installation)
    (installation / "site" / "added").mkdir()
    before = measure_runtime()
    _write("site/__editable__.project-1.0.pth", listing)(installation)
    assert measure_runtime() == before


def test_a_shim_counts_by_what_it_does_and_not_by_where_it_lies(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packaging tools leave code that runs at every start: the same code gives the same digest, in any directory."""
    shim = _write("site/shim.pth", "import os; __import__('_shim')\n")
    bare = measure_runtime()
    shim(installation)
    _write("site/_shim/__init__.py")(installation)
    here = measure_runtime()
    assert here.start_up != bare.start_up
    (installation / "empty").mkdir()
    (installation / "again").symlink_to(installation / "site")
    for others in (["empty", "site"], ["site", "again"], ["again"]):
        monkeypatch.setattr(
            site, "getsitepackages", lambda others=others: [str(installation / name) for name in others]
        )
        if others != ["site", "again"]:
            assert measure_runtime() == here
        else:
            assert measure_runtime() != here  # it runs twice
    _write("site/_shim/__init__.py", "other = True\n")(installation)
    assert measure_runtime().start_up != here.start_up


def test_parts_are_not_confused(installation: Path) -> None:
    """The same files in another part, or cut elsewhere, give other digests; a part that was not measured is none."""
    files = measured_files()
    swapped = files | {"glasshouse": files["cryptography"], "cryptography": files["glasshouse"]}
    one, other = Measured.of(files), Measured.of(swapped)
    assert len({one.glasshouse, one.cryptography, other.glasshouse, other.cryptography}) == 4
    with pytest.raises(KeyError):
        Measured.of({part: files[part] for part in PARTS[1:]})


def test_an_archive_that_a_path_line_names_counts(installation: Path) -> None:
    """`site` puts any file on the search path that is there, and a ZIP archive may have start-up hooks in it."""
    before = measure_runtime()
    _write("site/evil.pth", "../evil.zip\n")(installation)
    assert measure_runtime() == before  # it is not there
    with ZipFile(installation / "evil.zip", "w") as archive:
        archive.writestr("sitecustomize.py", "stolen = True\n")
    poisoned = measure_runtime()
    assert {name for name in PARTS if poisoned.parts()[name] != before.parts()[name]} == {"start_up"}
    with ZipFile(installation / "evil.zip", "w") as archive:
        archive.writestr("sitecustomize.py", "stolen = 'more'\n")
    assert measure_runtime().start_up not in {before.start_up, poisoned.start_up}


def test_a_path_line_leads_where_site_takes_it(installation: Path) -> None:
    """`link/..` is the folder that the link lies in for `site`, and the parent of its target for the kernel."""
    _write("far/away/nothing.txt")(installation)
    (installation / "site" / "link").symlink_to(installation / "far" / "away")
    _write("site/evil.pth", "link/../evil\n")(installation)
    before = measure_runtime()
    _write("site/evil/sitecustomize.py")(installation)
    assert measure_runtime().start_up != before.start_up


def test_an_empty_folder_in_the_standard_library_hides_no_module(installation: Path) -> None:
    """An import passes over it and finds the module in a site directory."""
    (installation / STDLIB / "msvcrt").mkdir()
    before = measure_runtime()
    _write("site/msvcrt.py")(installation)
    assert measure_runtime().start_up != before.start_up


@pytest.mark.parametrize("beside", ["program", "library"])
def test_a_file_that_sets_the_search_path_is_refused(
    installation: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """CPython obeys `python._pth` on POSIX too: a folder before the standard library would run unmeasured."""
    _write("bin/python")(installation)
    monkeypatch.setattr(sys, "executable", str(installation / "bin" / "python"))
    measure_runtime()
    _write("bin/python._pth" if beside == "program" else f"lib{STDLIB}.so.1.0._pth", "/evil\n")(installation)
    with pytest.raises(PlatformError, match=r"\._pth changes where Python looks for modules; remove that file"):
        measure_runtime()


@pytest.mark.parametrize(
    "change",
    [
        "sys.path.insert(0, '/elsewhere')",
        "sys.path[sys.path.index(f'{library}/lib-dynload')] = '/elsewhere/lib-dynload'",  # as `home` in pyvenv.cfg may
        "sys.path[sys.path.index(library) - 1] = '/elsewhere/python.zip'",
        "sys.path.insert(sys.path.index(site.getsitepackages()[0]), '/elsewhere')",
    ],
)
def test_a_place_that_is_searched_before_any_package_is_refused(tmp_path: Path, change: str) -> None:
    """Native modules of the standard library could come from there, and no part would tell."""
    loaded, measured = _PRINT.strip().split("\n")
    code = f"{loaded}\nimport os, site, sys; library = os.path.dirname(os.__file__); {change}\n{measured}"
    command = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={tmp_path}", "-c", code]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "is searched for modules before any package" in refused.stderr


def test_what_a_path_line_adds_is_searched_for_hooks_too(installation: Path) -> None:
    _write("site/start.pth", f"{installation / 'added'}\n")(installation)
    (installation / "added").mkdir()
    before = measure_runtime()
    _write("added/sitecustomize.py")(installation)
    assert measure_runtime().start_up != before.start_up


@pytest.mark.parametrize(
    "harmless",
    [
        _write("glasshouse/__pycache__/code.cpython-311.pyc"),  # never read: -B and an empty pycache_prefix
        _write(f"{STDLIB}/site-packages/torch.py"),
        _write("site/torch/__init__.py"),  # trusted with plaintext only
        _write("glasshouse/notes.txt"),
    ],
)
def test_what_is_never_loaded_does_not_matter(installation: Path, harmless: Callable[[Path], None]) -> None:
    before = measure_runtime().sha256
    harmless(installation)
    assert measure_runtime().sha256 == before


def test_where_it_is_installed_does_not_matter(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measured_files()
    moved = installation / "moved"
    for name in ("glasshouse", "cryptography", "blake3", STDLIB, "site"):
        shutil.copytree(installation / name, moved / name)
    monkeypatch.setattr(glasshouse, "__file__", str(moved / "glasshouse" / "__init__.py"))
    monkeypatch.setattr(cryptography, "__file__", str(moved / "cryptography" / "__init__.py"))
    _modules_in(monkeypatch, moved)
    monkeypatch.setattr(measurement.os, "__file__", str(moved / STDLIB / "os.py"))
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(moved / "site")])
    assert measured_files() == before


def test_the_environment_is_told_by_versions_and_records(installation: Path) -> None:
    seen = {measure_environment()}
    assert measure_environment() in seen
    for change in (
        _write("site/torch-2.dist-info/RECORD", "torch/__init__.py,sha256=other,0\n"),
        _write("site/evil-1.dist-info/RECORD", ""),
        _write("site/bare-1.dist-info/METADATA", ""),
    ):
        change(installation)
        seen.add(measure_environment())
    assert len(seen) == 4
    _write("site/glasshouse_train-9.dist-info/RECORD", "x")(installation)  # measured file by file already
    assert measure_environment() in seen


def test_of_two_records_with_one_name_the_first_counts(installation: Path) -> None:
    """Imports take the first directory too; another record behind it would hide what was changed."""
    _write("site/added.pth", "../added\n")(installation)
    _write("added/torch-2.dist-info/RECORD", "as it was\n")(installation)
    before = measure_environment()
    _write("site/torch-2.dist-info/RECORD", "torch/__init__.py,sha256=other,0\n")(installation)
    assert measure_environment() != before


def test_a_file_that_cannot_be_read_is_not_left_out(installation: Path) -> None:
    (installation / "glasshouse" / "gone.py").symlink_to("/nonexistent/file")
    with pytest.raises(PlatformError) as refusal:
        measure_runtime()
    assert refusal.value.code is Code.PLATFORM


def test_a_tree_without_end_is_refused(installation: Path) -> None:
    (installation / "glasshouse" / "again").symlink_to(installation / "glasshouse")
    with pytest.raises(PlatformError):
        measure_runtime()


def test_every_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting to train waits for this: how long it takes is in `make bench-lifecycle`."""
    opened: list[str] = []
    real = os.open

    def open_(path: str, flags: int, *arguments: int) -> int:
        opened.append(path)
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", open_)
    files = measured_files()
    assert len(opened) == len(set(opened)) == sum(map(len, files.values())) > 500
