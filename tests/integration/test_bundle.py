"""A machine that has Python and torch, and no Glasshouse: it comes in one file, and measures the same everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.measurements.measured import Measured
from glasshouse.attestation.measurements.measurement import measured_files
from glasshouse.errors import Code, ExitCode, PeerError, PlatformError, UsageError
from glasshouse.jobs.places.runtime_bundle import make_bundle, read_bundle
from glasshouse.providers.place.bundled import install
from glasshouse.providers.serve.keepers import ENDED
from glasshouse.providers.serve.unpack import MANIFEST
from glasshouse.runtime import kernel as linux
from simulators.command_line import Shell
from tools.forked import in_child
from tools.machine import needs_root
from tools.sshd import needs_sshd, serving_ssh

_MEASURE = """
import json
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.attestation.measurements.measurement import measured_files
files = measured_files()
print(json.dumps({"parts": Measured.of(files).to_json(), "start_up": list(files["start_up"])}))
"""


def bare_python(folder: Path) -> Path:
    """Return an interpreter that has nothing but the standard library, as a machine's own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def here(command: Any) -> list[str]:
    return list(command)


def measured_by(python: str | Path) -> dict[str, Any]:
    command = [str(python), "-I", "-B", "-c", _MEASURE]
    told: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, cwd="/").stdout)
    return told


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "bundle.zip"
    make_bundle(path)
    return path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_python(tmp_path_factory.mktemp("machine") / "image")


@pytest.fixture(scope="module")
def installed(bundle: Path, machine: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return install(here, "lab", bundle, python=str(machine), folder=str(tmp_path_factory.mktemp("place") / "kept"))


def test_the_same_installation_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        make_bundle(bundle)
    again = make_bundle(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()
    assert read_bundle(bundle) == again
    with zipfile.ZipFile(bundle) as archive:
        names = archive.namelist()
    assert names[0] == MANIFEST
    assert names[1:] == sorted(names[1:])
    assert not [
        name for name in names if name.endswith((".pth", ".pyc", "RECORD", "direct_url.json")) or "bin/" in name
    ]
    for wanted in ("glasshouse/runtime/__main__.py", "glasshouse_train-0.1.0.dist-info/entry_points.txt"):
        assert f"site-packages/{wanted}" in names


def test_it_measures_the_same_wherever_it_lies_and_for_whomever(
    bundle: Path, machine: Path, installed: str, tmp_path: Path
) -> None:
    """Two installations at different paths, one of them moved since: one measurement, and no start-up hook."""
    other = install(here, "den", bundle, python=str(machine), folder=str(tmp_path / "another" / "path"))
    moved = tmp_path / "moved"
    shutil.move(Path(other).parents[1], moved)
    first, second = measured_by(installed), measured_by(moved / "bin" / "python")
    assert first == second
    assert first["start_up"] == []
    # Ours and the ciphers are what is installed here, file by file, though this is an editable installation.
    ours = Measured.of(measured_files()).to_json()
    assert {part: ours[part] for part in ("glasshouse", "cryptography", "interpreter")} == {
        part: first["parts"][part] for part in ("glasshouse", "cryptography", "interpreter")
    }


@needs_root
def test_another_user_measures_the_same(bundle: Path, installed: str, tmp_path: Path) -> None:
    """The interpreter of these tests may lie in a home that is closed to others: it is shown to that user for this."""
    mine, theirs = measured_by(installed), tmp_path / "told"
    folder = Path("/tmp") / f"glasshouse-other-{os.getpid()}"
    folder.mkdir(mode=0o755)
    shutil.copy(bundle, folder / "bundle.zip")
    (folder / "bundle.zip").chmod(0o644)
    theirs.touch(mode=0o666)
    descriptor = os.open(theirs, os.O_WRONLY)

    def as_nobody() -> bool:
        home = Path("/root")
        hidden = sorted({path for path in (Path(sys.base_prefix),) if path.is_relative_to(home)})
        linux.REAL.unshare(linux.CLONE_NEWNS)
        linux.REAL.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        shown = [(path, os.open(path, os.O_PATH)) for path in hidden]
        linux.REAL.mount("tmpfs", str(home), "tmpfs", 0, "mode=755")
        for path, opened in shown:
            path.mkdir(parents=True)
            linux.REAL.mount(f"/proc/self/fd/{opened}", str(path), None, linux.MS_BIND | linux.MS_REC)
        os.chown(folder, 65534, 65534)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        python = install(
            here, "lab", folder / "bundle.zip", python=os.path.realpath(sys.executable), folder=str(folder / "place")
        )
        os.write(descriptor, json.dumps(measured_by(python)).encode())
        return True

    try:
        assert in_child(as_nobody, limit_s=120)
        assert json.loads(theirs.read_text())["parts"] == mine["parts"]
    finally:
        os.close(descriptor)
        shutil.rmtree(folder)


def test_nothing_of_the_image_starts_in_the_runtime(bundle: Path, tmp_path: Path) -> None:
    """The image's packages are found, and the code of its `.pth` files does not run; a hook of its own is measured."""
    image = bare_python(tmp_path / "image")
    packages = next((tmp_path / "image" / "lib").glob("python*/site-packages"))
    (packages / "torch.py").write_text("version = 'the image'\n")
    (packages / "evil.pth").write_text("import sys; sys.evil = True\n")
    python = install(here, "lab", bundle, python=str(image), folder=str(tmp_path / "place"))
    code = "import sys, torch; print(torch.version, hasattr(sys, 'evil'))"
    assert subprocess.run([image, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.endswith(
        "True\n"
    )
    told = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "the image False\n"
    assert measured_by(python)["start_up"] == []
    (packages / "sitecustomize.py").write_text("hooked = True\n")
    assert measured_by(python)["start_up"] == ["site-0/sitecustomize.py"]


def _without_manifest(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("site-packages/evil.py", b"")


def _another(**changes: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        honest = {
            "machine": os.uname().machine,
            "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
            "system": "Linux",
        }
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(MANIFEST, json.dumps(honest | changes))
            archive.writestr("site-packages/glasshouse.py", b"")

    return write


def _with(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        _another()(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, b"x")

    return write


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda path: path.write_bytes(b"no archive"), "not a zip file"),
        (_without_manifest, "no bundle"),
        (_with("site-packages/../../../evil"), "no bundle"),
        (_with("/site-packages/evil"), "no bundle"),
        (_with("site-packages/.hidden/evil"), "no bundle"),
        (_with("bin/evil"), "no bundle"),
        (_another(python="3.1"), "for python 3.1"),
        (_another(machine="vax"), "for machine vax"),
        (_another(system="Darwin"), "for system Darwin"),
        (_another(), "does not run here"),
    ],
    ids=["no archive", "no manifest", "above", "absolute", "hidden", "beside", "python", "machine", "system", "broken"],
)
def test_what_a_machine_cannot_use_is_refused_and_leaves_nothing(
    tmp_path: Path, machine: Path, write: Callable[[Path], object], why: str
) -> None:
    write(tmp_path / "bad.zip")
    with pytest.raises(PlatformError, match=why) as refused:
        install(here, "lab", tmp_path / "bad.zip", python=str(machine), folder=str(tmp_path / "place"))
    assert refused.value.message.startswith("lab cannot use the bundle")
    assert list((tmp_path / "place" / "runtimes").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.zip", "place"]


def test_it_is_sent_once_goes_on_where_the_line_broke_and_a_damaged_one_leaves_nothing(
    bundle: Path, machine: Path, tmp_path: Path
) -> None:
    data, place = bundle.read_bytes(), tmp_path / "place"
    digest, script = hashlib.sha256(data).hexdigest(), Path(install.__globals__["unpack"].__file__)

    def sent(content: bytes) -> str:
        command = [machine, "-I", script, place, digest, str(len(data)), "ab" * 8]
        return subprocess.run(command, input=content, capture_output=True, check=False).stdout.decode()

    assert "send 0\n" in (broken := sent(data[:-2]))
    assert "did not come whole" in broken
    assert f"send {len(data) - 2}\n" in (damaged := sent(data[-2:-1] + b"?"))
    assert "damaged on its way" in damaged
    assert list((place / "runtimes").iterdir()) == []
    sent(data[:-2])

    def counted(command: Any) -> list[str]:
        return ["sh", "-c", f'tee {tmp_path / "passed"} | "$@"', "sh", *command]

    path = install(counted, "lab", bundle, python=str(machine), folder=str(place))
    assert (tmp_path / "passed").read_bytes() == script.read_bytes() + data[-2:]
    assert [kept.name for kept in (place / "runtimes").iterdir()] == [digest]
    assert "send" not in sent(b"")
    assert install(here, "lab", bundle, python=str(machine), folder=str(place)) == path
    place.chmod(0o777)
    with pytest.raises(PlatformError, match="own folder"):
        install(here, "lab", bundle, python=str(machine), folder=str(place))


def test_a_machine_that_was_cut_off_while_it_unpacked_unpacks_anew_also_as_a_process_of_the_same_number(
    bundle: Path, machine: Path, tmp_path: Path
) -> None:
    """A container that starts anew keeps its disk, and numbers its processes as it did before."""
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()

    def left(command: Any) -> list[str]:
        make = f'mkdir -p {tmp_path}/place/runtimes/{digest}.$$.new/bin; exec "$@"'
        return ["sh", "-c", make, "sh", *command]

    python = install(left, "lab", bundle, python=str(machine), folder=str(tmp_path / "place"))
    assert Path(python).exists()


def test_a_job_of_slurms_that_is_over_is_named_where_its_node_is_sent_a_bundle(
    bundle: Path, machine: Path, tmp_path: Path
) -> None:
    def over(_command: Any) -> list[str]:
        return ["sh", "-c", "echo 'srun: error: Slurm job 1 has expired' >&2"]

    with pytest.raises(PeerError, match="has expired") as refused:
        install(over, "node", bundle, python=str(machine), folder=str(tmp_path / "place"))
    assert "submit another" in refused.value.hint


def test_a_disk_without_room_for_a_bundle_is_told_and_left_as_it_was(
    bundle: Path, machine: Path, tmp_path: Path
) -> None:
    def narrow(command: Any) -> list[str]:
        return ["sh", "-c", 'ulimit -f 1000; exec "$@"', "sh", *command]

    with pytest.raises(PlatformError, match="File too large"):
        install(narrow, "lab", bundle, python=str(machine), folder=str(tmp_path / "place"))
    assert list((tmp_path / "place" / "runtimes").iterdir()) == []


def test_a_bundle_that_no_run_uses_goes_when_another_comes(bundle: Path, machine: Path, tmp_path: Path) -> None:
    place, names = tmp_path / "place", ("idle", "idle.part", "used today")
    kept = place / "runtimes"
    kept.mkdir(parents=True, mode=0o700)
    place.chmod(0o700)
    for name in names:
        (kept / name).mkdir() if name != "idle.part" else (kept / name).touch()
        if name.startswith("idle"):
            os.utime(kept / name, (time.time() - 3 * 24 * 3600,) * 2)
    run = place / "runs" / ("ab" * 16)
    run.mkdir(parents=True)

    def came() -> list[str]:
        python = install(here, "lab", bundle, python=str(machine), folder=str(place))
        shutil.rmtree(Path(python).parents[1])
        return sorted(path.name for path in kept.iterdir())

    assert came() == sorted(names), "a run goes on, which may use any"
    (run / ENDED).write_text("0")
    assert came() == ["used today"]


def test_a_machine_that_answers_nothing_or_nonsense(bundle: Path) -> None:
    for program in ("true", "echo welcome", "head -c 9; echo; echo glasshouse-bundle other have /bin/sh"):
        with pytest.raises(PeerError) as refused:
            install(
                lambda _command, program=program: ["sh", "-c", program], "lab", bundle, python="python3", folder="-"
            )
        assert refused.value.code is Code.PLACE_UNREACHABLE


def test_wheels_of_another_python_make_a_bundle_for_it(tmp_path: Path) -> None:
    for name in ("blake3", "cffi", "cryptography"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-cp312-cp312-manylinux_2_28_aarch64.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", b"")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", b"Name: x\n")
            wheel.writestr(f"{name}-1.0.data/scripts/evil", b"")
            wheel.writestr("../evil.py", b"")
    out = tmp_path / "made.zip"
    with pytest.raises(UsageError, match="another system"):
        make_bundle(out, wheels=tmp_path, python="3.12")
    with zipfile.ZipFile(tmp_path / "blake3-1.0-cp312-cp312-manylinux_2_28_aarch64.whl", "a") as wheel:
        wheel.writestr("blake3/blake3.cpython-312-aarch64-linux-gnu.so", b"")
    for version in ("3.11", "2.7", "3.12.1"):
        with pytest.raises(UsageError):
            make_bundle(out, wheels=tmp_path, python=version)
    made = make_bundle(out, wheels=tmp_path, python="3.12")
    assert (made.python, made.machine, made.distributions["cryptography"]) == ("3.12", "aarch64", "1.0")
    with zipfile.ZipFile(out) as archive:
        assert not [name for name in archive.namelist() if "evil" in name]
    with pytest.raises(UsageError, match="not for Linux and Python"):
        make_bundle(tmp_path / "other.zip", python="3.99")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("brought")
    (folder / "user").mkdir()
    made = Shell(folder / "user")
    with serving_ssh(folder / "ssh") as host:
        assert made.ask("init").code == 0
        assert made.ask("runtime", "bundle", "-o", "bundle.zip").code == 0
        # The machine has what the tests' environment has (torch), and its own Glasshouse is never used.
        url, ways = f"ssh://{host.host}:{host.port}", ("--config", str(folder / "ssh" / "client"))
        there = ("--python", sys.executable, "--folder", str(folder / "there"), "--bundle", "bundle.zip")
        named = made.ask("machine", "add", "lab", url, *ways, *there)
        assert named.code == 0, named.err
        # The start-up hooks of this installation are not those of the bundle: the job says which it accepts.
        assert made.ask("reference", "add", "brought", "--on", "lab").code == 0
        job = made.folder / "short.toml"
        made.job("short", "24")
        job.write_text(job.read_text() + 'reference = ["brought"]\n')
        yield made
        assert made.left_running() == []


@needs_sshd
@pytest.mark.slow
def test_a_run_on_a_machine_without_glasshouse(shell: Shell) -> None:
    told = shell.ask("measure", "--on", "lab", "--diff", "this", "--json")
    assert told.code == 0, told.err
    assert {one["part"] for one in told.object["differences"]} <= {"start_up"}
    kept = list((shell.folder.parent / "there" / "runtimes").iterdir())
    assert [path.name for path in kept] == [hashlib.sha256((shell.folder / "bundle.zip").read_bytes()).hexdigest()]
    ended = shell.ask("run", "short.toml", "--on", "lab", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.out + ended.err
    assert shell.ask("verify", "latest").code == ExitCode.DONE
    assert shell.ask("fetch", "latest", "-o", "outputs").code == ExitCode.DONE
    assert kept == list((shell.folder.parent / "there" / "runtimes").iterdir())
    refused = shell.ask("machine", "add", "den", "ssh://nowhere", "--bundle", "short.toml")
    assert refused.code == ExitCode.USAGE


@needs_sshd
@pytest.mark.slow
def test_ranks_find_the_sealed_backend_in_a_bundle(shell: Shell) -> None:
    from simulators.command_line import SUM

    job = (shell.folder / "short.toml").read_text().replace("train.py", "sum.py")
    (shell.folder / "wide.toml").write_text(job)
    (shell.folder / "sum.py").write_text(SUM)
    ended = shell.ask("run", "wide.toml", "--on", "lab", "--ranks", "2", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.out + ended.err
    assert "rank 0 of 2 has 3" in shell.ask("logs", "latest").out


def another_build() -> str | None:
    """Return an interpreter of the same minor version that somebody else built, as the system's mostly is."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    found = shutil.which(name, path="/usr/bin")
    return None if found is None or os.path.realpath(found) == os.path.realpath(sys.executable) else found


@needs_sshd
@pytest.mark.slow
@pytest.mark.skipif(another_build() is None, reason="there is no other build of this version of Python here")
def test_a_machine_whose_python_is_another_build_is_refused_by_its_part_until_it_is_recorded(shell: Shell) -> None:
    known = json.loads((shell.home / "machines.json").read_text())["lab"]
    there = ("--python", another_build() or "", "--folder", str(shell.folder.parent / "debian"))
    ways = ("--config", known["config"], "--bundle", "bundle.zip")
    assert shell.ask("machine", "add", "debian", known["url"], *there, *ways).code == 0
    shell.job("plain", "24")
    refused = shell.ask("run", "plain.toml", "--on", "debian", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown"), refused.err
    assert "debian has another interpreter than the reference this" in refused.error["message"]
    assert shell.ask("reference", "add", "debian", "--on", "debian").code == 0
    job = shell.folder / "plain.toml"
    job.write_text(job.read_text() + 'reference = ["debian"]\n')
    ended = shell.ask("run", "plain.toml", "--on", "debian", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.out + ended.err
