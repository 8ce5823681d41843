"""An unpacked image is measured without being run, and one that is made to harm its reader is refused."""

from __future__ import annotations

import hashlib
import os
import site
import socket
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.errors import Code, GlasshouseError, PlatformError, UsageError
from glasshouse.jobs.references import image, tree
from glasshouse.jobs.references.image import image_files
from glasshouse.jobs.references.tree import ImageTree

LIBRARY = "usr/local/lib/python3.11"
PACKAGES = f"{LIBRARY}/site-packages"
SECRET = "the owner's own\n"


def write(root: Path, name: str, text: str = "x = 1\n") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def link(root: Path, name: str, target: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(target)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The least that an image has, with a program that would leave a trace if it were run."""
    made = tmp_path / "image"
    program = write(made, "usr/local/bin/python3.11", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    link(made, "usr/local/bin/python3", "python3.11")
    for name in ("os.py", "json/__init__.py", "lib-dynload/_x.so", "test/big.py"):
        write(made, f"{LIBRARY}/{name}")
    write(made, f"{LIBRARY}/site.py", 'def getsitepackages(prefixes=None):\n    "site-packages"\n\ndef other():\n')
    (made / LIBRARY / "site.py").write_text("\n" + (made / LIBRARY / "site.py").read_text())
    for name in ("glasshouse", "cryptography", "blake3"):
        write(made, f"{PACKAGES}/{name}/__init__.py")
    write(made, f"{PACKAGES}/_cffi_backend.cpython-311-x86_64-linux-gnu.so")
    write(tmp_path, "outside/sitecustomize.py", SECRET)
    return made


def digests(root: Path) -> set[bytes]:
    return {digest for files in image_files(root).values() for digest in files.values()}


def refusal(root: Path, **given: str) -> GlasshouseError:
    with pytest.raises(GlasshouseError) as refused:
        image_files(root, **given)
    assert not (root.parent / "ran").exists()
    return refused.value


def test_nothing_of_an_image_runs_and_each_part_has_its_files(root: Path) -> None:
    files = image_files(root)
    assert {part: sorted(names) for part, names in files.items()} == {
        "cryptography": [
            "_cffi_backend.cpython-311-x86_64-linux-gnu.so",
            "blake3/__init__.py",
            "cryptography/__init__.py",
        ],
        "glasshouse": ["glasshouse/__init__.py"],
        "interpreter": [
            "python",
            "stdlib/json/__init__.py",
            "stdlib/lib-dynload/_x.so",
            "stdlib/os.py",
            "stdlib/site.py",
        ],
        "start_up": [],
    }
    program = (root / "usr/local/bin/python3.11").read_bytes()
    assert files["interpreter"]["python"] == hashlib.sha256(program).digest()
    assert not (root.parent / "ran").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{PACKAGES}/glasshouse/__init__.py", "glasshouse"),
        (f"{PACKAGES}/blake3/more.py", "cryptography"),
        (f"{LIBRARY}/os.py", "interpreter"),
        (f"{PACKAGES}/sitecustomize.py", "start_up"),
        (f"{PACKAGES}/hook.pth", "start_up"),
    ],
)
def test_a_changed_file_changes_its_part_alone(root: Path, name: str, part: str) -> None:
    before = image_files(root)
    write(root, name, "import json\n")
    after = image_files(root)
    assert {one for one in after if after[one] != before[one]} == {part}


def test_links_lead_within_the_image(root: Path) -> None:
    """An absolute link and any number of `..` begin at the image's root, as they would where it runs."""
    outside = root.parent / "outside" / "sitecustomize.py"
    inside = write(root, str(outside)[1:], "the image's\n")
    link(root, f"{PACKAGES}/glasshouse/one.py", str(outside))
    link(root, f"{PACKAGES}/glasshouse/two.py", "../" * 30 + str(outside)[1:])
    write(root, f"{PACKAGES}/path.pth", f"{outside.parent}\n" + "../" * 30 + f"{str(outside.parent)[1:]}\n")
    files = image_files(root)
    own = hashlib.sha256(inside.read_bytes()).digest()
    assert files["glasshouse"]["glasshouse/one.py"] == files["glasshouse"]["glasshouse/two.py"] == own
    assert files["start_up"] == {"site-0/sitecustomize.py": own}


@pytest.mark.parametrize(
    "target", ["{outside}/sitecustomize.py", "../../../../../../../../..{outside}/sitecustomize.py"]
)
def test_a_file_of_the_owners_is_never_read(root: Path, target: str) -> None:
    outside = str(root.parent / "outside")
    link(root, f"{PACKAGES}/sitecustomize.py", target.format(outside=outside))
    assert refusal(root).code is Code.PLATFORM  # it is a link to nowhere
    (root / PACKAGES / "sitecustomize.py").unlink()
    write(root, f"{PACKAGES}/path.pth", f"{outside}\n")
    assert hashlib.sha256(SECRET.encode()).digest() not in digests(root)


@pytest.mark.parametrize("name", [LIBRARY, PACKAGES, "usr/local/bin/python3.11", "usr", f"{LIBRARY}/site.py"])
def test_what_an_image_takes_from_the_owners_system_is_not_there(root: Path, name: str) -> None:
    real = {LIBRARY: str(Path(os.__file__).parent), PACKAGES: site.getsitepackages()[0], "usr": "/usr"}
    (root / name).rename(root.parent / "was")
    link(root, name, real.get(name, os.path.realpath(sys.executable)))
    refusal(root)


def test_an_environment_of_the_image_is_entered_as_its_interpreter_would(root: Path) -> None:
    """`home`, and the link to the interpreter, are paths of the image."""
    for name in ("glasshouse", "cryptography", "blake3"):
        (root / "opt/env/lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
        (root / PACKAGES / name).rename(root / "opt/env/lib/python3.11/site-packages" / name)
    link(root, "opt/env/bin/python", "/usr/local/bin/python3")
    write(root, "opt/env/pyvenv.cfg", "home = /usr/local/bin\ninclude-system-site-packages = false\n")
    write(root, f"{PACKAGES}/sitecustomize.py")
    files = image_files(root, python="/opt/env/bin/python")
    assert (list(files["glasshouse"]), list(files["start_up"])) == (["glasshouse/__init__.py"], [])
    write(root, "opt/env/pyvenv.cfg", "home = /usr/local/bin\n")
    assert list(image_files(root, python="/opt/env/bin/python")["start_up"]) == ["site-0/sitecustomize.py"]
    for home in ("", "bin", "/nowhere", "/\0brought", "//usr/local/bin", "/usr/./local/bin", "/usr/../usr/local/bin"):
        write(root, "opt/env/pyvenv.cfg", f"home = {home}\n")
        assert isinstance(refusal(root, python="/opt/env/bin/python"), PlatformError)


def _fifo(root: Path, name: str) -> None:
    os.mkfifo(root / name)


def _hole(root: Path, name: str) -> None:
    write(root, name)
    os.truncate(root / name, 1 << 40)


def _socket(root: Path, name: str) -> None:
    before = Path.cwd()
    os.chdir((root / name).parent)  # a socket's path has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(Path(name).name)
    finally:
        os.chdir(before)


def _loop(root: Path, name: str) -> None:
    link(root, name, Path(name).name + "2")
    link(root, name + "2", Path(name).name)


def _many(root: Path, name: str) -> None:
    for number in range(60):
        link(root, f"{name}{number}", Path(f"{name}{number + 1}").name)
    link(root, name, Path(name).name + "0")


def _again(root: Path, name: str) -> None:
    link(root, name.removesuffix(".py"), "..")


HOSTILE: list[tuple[str, Callable[[Path, str], object], str]] = [
    ("a fifo", _fifo, "no regular file"),
    ("a socket", _socket, "no regular file"),
    ("a hole of a terabyte", _hole, "more than is read"),
    ("links in a circle", _loop, "more than 40 links"),
    ("a long way of links", _many, "more than 40 links"),
    ("a folder in itself", _again, "without end"),
    ("a folder", lambda root, name: (root / name).mkdir(), "no regular file"),
    ("a name that is no text", lambda root, name: write(root, f"{name[:-3]}\udcff/x.py"), "no text"),
]


@pytest.mark.parametrize(("what", "make", "why"), HOSTILE, ids=[what for what, _, _ in HOSTILE])
@pytest.mark.parametrize("name", [f"{PACKAGES}/glasshouse/evil.py", f"{LIBRARY}/evil.py", f"{PACKAGES}/org/evil.py"])
def test_what_would_harm_its_reader_is_refused(
    root: Path, name: str, what: str, make: Callable[[Path, str], object], why: str
) -> None:
    write(root, f"{PACKAGES}/org/__init__.py")
    make(root, name)
    refused = refusal(root)
    assert isinstance(refused, PlatformError)
    assert why in refused.message


@pytest.mark.parametrize("make", [_fifo, _hole, _loop])
def test_a_start_up_file_that_would_harm_its_reader_is_refused(root: Path, make: Callable[[Path, str], object]) -> None:
    make(root, f"{PACKAGES}/evil.pth")
    assert isinstance(refusal(root), PlatformError)


def test_what_is_looked_at_and_read_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files(root)
    for limit, why in (("MAX_ENTRIES", "names to look at"), ("MAX_BYTES", "more than is read")):
        with monkeypatch.context() as small:
            small.setattr(tree, limit, 20)
            assert why in refusal(root).message
    write(root, f"{PACKAGES}/long.pth", "x" * tree.MAX_CONTENT_BYTES + "x")
    assert "read as a whole" in refusal(root).message
    for number in range(tree.MAX_CONTENTS_BYTES // tree.MAX_CONTENT_BYTES + 1):
        write(root, f"{PACKAGES}/{number}.pth", "#" * tree.MAX_CONTENT_BYTES)
    (root / PACKAGES / "long.pth").unlink()
    assert "MiB together" in refusal(root).message


def test_links_that_lead_far_are_followed_within_bounds_for_the_whole_tree(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        link(root, f"far/{number}", "/." * 500 + "/usr")
    monkeypatch.setattr(tree, "MAX_LOOKED_AT", 50_000, raising=False)
    with ImageTree(root) as disk:
        for _ in range(50):
            assert disk.real("/far/0") == "/usr"
        with pytest.raises(OSError, match="more and longer paths"):
            [disk.real(f"/far/{number}") for number in range(20)]
    monkeypatch.setattr(tree, "MAX_ENTRIES", 3)
    (root / "empty").mkdir()
    with ImageTree(root) as disk, pytest.raises(OSError, match="names to look at"):
        [list(disk.listed("/empty")) for _ in range(4)]


def test_a_folder_that_becomes_a_link_while_it_is_read_leads_nowhere(root: Path) -> None:
    secret = root.parent / "outside"
    with ImageTree(root) as disk:
        path = f"/{PACKAGES}/glasshouse"
        (root / PACKAGES / "glasshouse" / "sitecustomize.py").touch()
        assert disk.real(path) == path
        (root / PACKAGES / "glasshouse").rename(root.parent / "was")
        (root / PACKAGES / "glasshouse").symlink_to(secret)
        with pytest.raises(OSError, match="cannot be opened"):
            disk.digest(f"{path}/sitecustomize.py", bytearray(64))
        with pytest.raises(OSError, match="cannot be opened"):
            list(disk.listed(path))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("usr/local/bin/python3.11._pth", "/evil\n", "changes where Python looks"),
        ("usr/local/bin/pyvenv.cfg", "home = /evil\n", "beside the program"),
        ("usr/local/bin/pybuilddir.txt", "evil", "look elsewhere"),
        ("usr/local/lib/python311.zip", "", "archive"),
        ("usr/local/bin/lib/python3.11/lib-dynload/_x.so", "", "native modules"),
        ("usr/local/bin/lib/python3.11/os.py", "", "native modules"),
        (f"{LIBRARY}/site.py", "def getsitepackages(): pass\n", "in a way that is not known"),
        (f"{PACKAGES}/msvcrt.py", "", "has a name of the standard library"),
        (f"{PACKAGES}/sys.py", "", "has a name of the standard library"),
        (f"{LIBRARY}/glasshouse.py", "", "single file"),
        (f"{PACKAGES}/_cffi_backend.abi3.so", "", "more than one"),
    ],
)
def test_where_files_do_not_tell_what_would_start_it_is_refused(root: Path, name: str, text: str, why: str) -> None:
    write(root, name, text)
    refused = refusal(root)
    assert isinstance(refused, PlatformError)
    assert why in refused.message


def test_an_image_without_glasshouse_or_python_says_what_to_name(root: Path) -> None:
    for python, code in (("bin/python3", Code.USAGE), ("/usr/../bin/x", Code.USAGE), ("/bin/x", Code.FILE_MISSING)):
        assert refusal(root, python=python).code is code
    (root / PACKAGES / "blake3" / "__init__.py").unlink()
    refused = refusal(root)
    assert "no blake3" in refused.message
    assert "--bundle" in refused.hint
    (root / "usr/local/bin/python3").unlink()
    assert "no python3 in" in refusal(root).message
    for missing in (root / "nowhere", root / "usr/local/bin/python3.11"):
        with pytest.raises(UsageError, match="cannot read the tree"):
            image_files(missing)


def test_a_bundle_of_another_version_or_one_that_unpacks_to_more_is_refused(root: Path) -> None:
    bundle = root.parent / "bundle.zip"
    manifest = '{"distributions":{},"format":"glasshouse-bundle/1","machine":"x","python":"3.12","system":"Linux"}'
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("bundle.json", manifest)
    with pytest.raises(UsageError, match=r"is Python 3\.11, and .* is for 3\.12"):
        image_files(root, bundle=bundle)
    for deep in ("[" * 20_000, manifest.replace("{}", f'{{"x":"{"x" * 70_000}"}}').replace("3.12", "3.11")):
        with zipfile.ZipFile(bundle, "w") as archive:
            archive.writestr("bundle.json", deep)
        with pytest.raises(UsageError, match="is not a bundle"):
            image_files(root, bundle=bundle)
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bundle.json", manifest.replace("3.12", "3.11"))
        archive.writestr("site-packages/x.py", bytes(1 << 20))
    with pytest.raises(UsageError, match="is not a bundle"):
        image_files(root, bundle=bundle)


def test_the_standard_library_of_each_version_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sys.version_info[1]
    assert image._modules(ours) == sys.stdlib_module_names
    assert {minor: "distutils" in image._modules(minor) for minor in (11, 12, 13)} == {11: True, 12: False, 13: False}
    assert {minor: "audioop" in image._modules(minor) for minor in (11, 12, 13)} == {11: True, 12: True, 13: False}
    names = {minor: image._modules(minor) for minor in (11, 12, 13)}
    for owner, theirs in names.items():
        with monkeypatch.context() as there:
            there.setattr(sys, "stdlib_module_names", theirs)
            there.setattr(sys, "version_info", (3, owner))
            assert {minor: image._modules(minor) for minor in names} == names
    for minor in (10, 99):
        with pytest.raises(OSError, match="not known here"):
            image._modules(minor)
