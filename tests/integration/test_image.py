"""A container image that is measured unrun, and run: one measurement, part by part and file by file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.attestation.measurements.measured import PARTS, Measured
from glasshouse.errors import ExitCode
from glasshouse.jobs.places.runtime_bundle import make_bundle
from glasshouse.jobs.references.image import image_files
from glasshouse.jobs.references.known_references import Files, differences
from glasshouse.providers.place.bundled import install
from simulators.command_line import Shell
from tools.machine import needs_namespaces, needs_root
from tools.sshd import needs_sshd, serving_ssh

NAME = f"python{sys.version_info[0]}.{sys.version_info[1]}"
LIBRARY = f"usr/local/lib/{NAME}"
_MEASURE = """
import json
from glasshouse.attestation.measurements.measurement import measured_files
print(json.dumps({part: {name: one.hex() for name, one in of.items()} for part, of in measured_files().items()}))
"""
_SITES = "import json, site; print(json.dumps(site.getsitepackages()))"
# The system's shared libraries are this machine's; all else is the image's.
_CHROOT = """
set -e
for name in lib lib64 usr/lib usr/lib64; do
  if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$1/$name"
  elif [ -d "/$name" ]; then mkdir -p "$1/$name"; mount --bind "/$name" "$1/$name"; fi
done
exec chroot "$@"
"""


def told(command: list[str]) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR"))}  # of a shared build
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", env=environment).stdout


def live(*command: str) -> Files:
    """Run a program of an image, and return what it measures itself by."""
    found = json.loads(told([*command, "-I", "-B", "-c", _MEASURE]))
    return {part: {name: bytes.fromhex(one) for name, one in found[part].items()} for part in PARTS}


def same(unrun: Files, run: Files) -> bool:
    assert differences(unrun, run) == []
    assert Measured.of(unrun) == Measured.of(run)
    return len(unrun["interpreter"]) > 300 and len(unrun["glasshouse"]) > 100


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "bundle.zip"
    make_bundle(path)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A copy of this interpreter and its library in a folder of their own."""
    root = tmp_path / "image"
    (root / "usr/local/bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), root / "usr/local/bin" / NAME)
    (root / "usr/local/bin/python3").symlink_to(NAME)
    stdlib, left_out = Path(sysconfig.get_path("stdlib")), {"__pycache__", "site-packages", "dist-packages"}
    shutil.copytree(stdlib, root / LIBRARY, ignore=lambda at, _: left_out | ({"test"} if Path(at) == stdlib else set()))
    for library in stdlib.parent.glob(f"lib{NAME}*"):
        shutil.copy2(library, root / LIBRARY / ".." / library.name, follow_symlinks=False)
    return root


def python_of(image: Path) -> str:
    return str(image / "usr/local/bin/python3")


def packages_of(python: str) -> Path:
    path = Path(json.loads(told([python, "-I", "-c", _SITES]))[0])
    path.mkdir(parents=True, exist_ok=True)
    return path


def put(bundle: Path, packages: Path) -> None:
    """Install what a bundle has, as an image's maker would."""
    with zipfile.ZipFile(bundle) as archive:
        for name in archive.namelist()[1:]:
            path = packages / name.removeprefix("site-packages/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def test_an_image_with_glasshouse_measures_as_it_would_if_it_ran(image: Path, bundle: Path) -> None:
    python = python_of(image)
    packages = packages_of(python)
    put(bundle, packages)
    before = image_files(image)
    assert same(before, live(python))
    changes = {
        "glasshouse": packages / "glasshouse" / "errors.py",
        "cryptography": packages / "blake3" / "__init__.py",
        "interpreter": image / LIBRARY / "json" / "__init__.py",
        "start_up": packages / "shim.pth",
    }
    (packages / "shim").mkdir()
    (packages / "shim" / "__init__.py").touch()
    for part, path in changes.items():
        with path.open("a") as file:
            file.write("import shim\n" if path.suffix == ".pth" else "\n# changed\n")
        after = image_files(image)
        assert same(after, live(python))
        assert {one for one in PARTS if after[one] != before[one]} == {part}
        before = after
    assert "site-0/shim/__init__.py" in before["start_up"]


def test_an_image_that_is_brought_a_bundle_measures_as_it_would_if_it_ran(image: Path, bundle: Path) -> None:
    """Code in the image's `.pth` files does not run there; its hooks do."""
    python = python_of(image)
    packages = packages_of(python)
    (packages / "evil.pth").write_text("import sys; sys.evil = True\n")
    brought = install(lambda command: list(command), "box", bundle, python=python, folder=str(image.parent / "place"))
    unrun = image_files(image, bundle=bundle)
    assert same(unrun, live(brought))
    assert unrun["start_up"] == {}
    (packages / "sitecustomize.py").write_text("hooked = True\n")
    unrun = image_files(image, bundle=bundle)
    assert same(unrun, live(brought))
    assert list(unrun["start_up"]) == ["site-0/sitecustomize.py"]


@needs_root
@needs_namespaces
def test_absolute_links_and_environments_lead_where_they_do_in_a_container(image: Path, bundle: Path) -> None:
    packages = image / f"opt/env/lib/{NAME}/site-packages"
    packages.mkdir(parents=True)
    put(bundle, packages)
    (image / "opt/env/bin").mkdir()
    (image / "opt/env/bin/python").symlink_to("/usr/local/bin/python3")
    (image / "opt/env/pyvenv.cfg").write_text("home = /usr/local/bin\ninclude-system-site-packages = false\n")
    (image / "opt/ours").mkdir()
    (packages / "glasshouse").rename(image / "opt/ours/glasshouse")
    (packages / "ours.pth").write_text("/opt/ours\n/opt/../../../opt/hooks\n")
    (image / "opt/hooks").symlink_to("/../../srv")
    (image / "srv").mkdir()
    (image / "srv/sitecustomize.py").write_text("hooked = True\n")
    unrun = image_files(image, python="/opt/env/bin/python")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _CHROOT, "sh", str(image)]
    assert same(unrun, live(*command, "/opt/env/bin/python"))
    assert list(unrun["start_up"]) == ["site-0/sitecustomize.py"]


def systems_own() -> str | None:
    """Return the system's interpreter, whose packages lie where its distribution wants them."""
    found = Path("/usr/bin") / NAME
    return str(found) if found.exists() else None


@pytest.mark.skipif(systems_own() is None, reason=f"this system has no {NAME} of its own")
def test_a_distributions_own_interpreter_measures_as_it_would_if_it_ran(bundle: Path, tmp_path: Path) -> None:
    python = systems_own() or ""
    brought = install(lambda command: list(command), "box", bundle, python=python, folder=str(tmp_path / "place"))
    assert same(image_files(Path("/"), python=python, bundle=bundle), live(brought))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "user").mkdir()
    made = Shell(tmp_path / "user")
    with serving_ssh(tmp_path / "ssh") as host:
        assert made.ask("init").code == 0
        assert made.ask("runtime", "bundle", "-o", "bundle.zip").code == 0
        url, ways = f"ssh://{host.host}:{host.port}", ("--config", str(tmp_path / "ssh" / "client"))
        there = ("--python", sys.executable, "--folder", str(tmp_path / "there"), "--bundle", "bundle.zip")
        named = made.ask("machine", "add", "box", url, *ways, *there)
        assert named.code == 0, named.err
        yield made
        assert made.left_running() == []


@needs_sshd
@pytest.mark.slow
def test_a_run_where_an_image_was_measured_before(shell: Shell, image: Path) -> None:
    """Nothing is asked of the machine: its owner measures its tree (this system's), names it in the job, and runs."""
    brought = ("--bundle", "bundle.zip")
    recorded = shell.ask("reference", "add", "image", "--tree", "/", "--python", sys.executable, *brought)
    assert recorded.code == ExitCode.DONE, recorded.err
    with (image / LIBRARY / "json" / "tool.py").open("a") as file:
        file.write("# changed\n")
    assert shell.ask("reference", "add", "other", "--tree", str(image), *brought).code == ExitCode.DONE
    for name, reference in (("short", "image"), ("refused", "other")):
        job = shell.job(name, "24")
        job.write_text(job.read_text() + f'reference = ["{reference}"]\n')
    ended = shell.ask("run", "short.toml", "--on", "box", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.out + ended.err
    refused = shell.ask("run", "refused.toml", "--on", "box", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown"), refused.err
    assert "box has another interpreter than the reference other" in refused.error["message"]
    assert "stdlib/json/tool.py (changed)" in refused.error["message"]
    for wrong in (("--on", "box", "--tree", str(image)), ("--python", "/usr/bin/python3")):
        assert shell.ask("reference", "add", "wrong", *wrong).code == ExitCode.USAGE
