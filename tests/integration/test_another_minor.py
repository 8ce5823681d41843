"""A machine whose Python is of another minor version than its owner's: by a stand-in, which is always there.

It says that it is the next version and has files of its own; what is compiled in it is this version's. Other real
interpreters are asked where this machine has them.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode, PlatformError
from glasshouse.jobs.places.runtime_bundle import make_bundle
from glasshouse.providers.place.bundled import install
from simulators.command_line import Shell
from tools import another_minor
from tools.another_minor import MINOR, OURS
from tools.sshd import needs_sshd, serving_ssh


def wheels(folder: Path) -> Path:
    """Write the wheels of what the runtime needs as for the next version: what is installed, under its names."""
    folder.mkdir()
    for name in ("blake3", "cffi", "cryptography"):
        found = metadata.distribution(name)
        with zipfile.ZipFile(folder / f"{name}-{found.version}-cp3{MINOR}-cp3{MINOR}-linux.whl", "w") as wheel:
            for file in found.files or ():
                if ".." not in file.parts and not file.name.endswith(".pyc"):
                    renamed = file.as_posix().replace(f"cpython-3{OURS}", f"cpython-3{MINOR}")
                    wheel.writestr(renamed, Path(str(found.locate_file(file))).read_bytes())
    return folder


def others(folder: Path) -> Iterator[str]:
    """Yield the stand-in, and the other interpreters that this machine has."""
    yield another_minor.program(folder)
    for minor in range(11, 20):
        path = shutil.which(f"python3.{minor}")
        ask = "import sys; print(sys.version_info[1])"
        if path and minor != OURS:
            told = subprocess.run([path, "-I", "-c", ask], capture_output=True, text=True, check=False).stdout
            if told.strip() == str(minor):  # and no launcher that has none
                yield path


def test_a_bundle_for_this_version_is_refused_by_another_in_words(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle.zip")
    for python in others(tmp_path):
        with pytest.raises(PlatformError, match=rf"is for python 3\.{OURS}, and this machine has 3\.") as refused:
            install(list, "lab", tmp_path / "bundle.zip", python=python, folder=str(tmp_path / "place"))
        assert "glasshouse runtime bundle --help" in refused.value.hint


@needs_sshd
@pytest.mark.slow
def test_a_machine_of_another_version_takes_its_bundle_and_is_refused_by_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    shell = Shell(tmp_path / "user")
    python = another_minor.program(tmp_path)
    with serving_ssh(tmp_path / "ssh") as host:
        assert shell.ask("init").code == 0
        made = shell.ask(
            *("runtime", "bundle", "-o", "bundle.zip", "--python", f"3.{MINOR}"),
            *("--wheels", str(wheels(tmp_path / "wheels")), "--json"),
        )
        assert (made.code, made.object["python"]) == (ExitCode.DONE, f"3.{MINOR}"), made.err
        url, ways = f"ssh://{host.host}:{host.port}", ("--config", str(tmp_path / "ssh" / "client"))
        there = ("--python", python, "--folder", str(tmp_path / "there"), "--bundle", "bundle.zip")
        assert shell.ask("machine", "add", "lab", url, *ways, *there).code == ExitCode.DONE
        told = shell.ask("measure", "--on", "lab", "--diff", "this", "--json")
        assert told.code == ExitCode.DONE, told.err
        different = {one["part"] for one in told.object["differences"]}
        assert {"interpreter"} <= different <= {"cryptography", "interpreter", "start_up"}
        shell.job("plain", "24")
        refused = shell.ask("run", "plain.toml", "--on", "lab", "--json")
        assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown"), refused.err
        # Its ciphers are built for its version too; whoever made the bundle vouches for them and for no interpreter.
        signed = shell.ask("reference", "sign", "bundle.zip", "-o", "release.json", "--json").object
        take = ("--from", "release.json", "--signed-by", signed["signed_by"])
        assert shell.ask("reference", "add", "release", *take).code == ExitCode.DONE
        job = shell.job("released", "24")
        job.write_text(job.read_text() + 'reference = ["release", "this"]\n')
        refused = shell.ask("run", "released.toml", "--on", "lab", "--json")
        assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown"), refused.err
        assert "lab has another interpreter than the reference this" in refused.error["message"]
        assert "python (changed)" in refused.error["message"]
        assert "nothing was released" in refused.error["message"]
    assert shell.left_running() == []
