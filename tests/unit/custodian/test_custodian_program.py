"""The custodian as a program: what it runs, what it is given, who can read it, and what ends it."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import cryptography
import pytest

import glasshouse
from benchmarks.trusted import TIERS, closure
from glasshouse.custodian.exchange import Request
from glasshouse.errors import Code, InternalError, PlatformError
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.keys.custodian import PROGRAM, Custodian, Regions
from glasshouse.runtime.loop import Loop
from glasshouse.wire.crypto import HPKE_PUBLIC_BYTES
from tools.forked import in_child
from tools.machine import needs_root, needs_tracing
from tools.runtime_package import OwnersPackage, seal
from tools.tracer import Tracer
from tools.waiting import wait_for

# Executed in place of the program: each goes on with the real one.
LISTING = f"""
import os, runpy, sys

def key():
    opened = sorted(map(int, os.listdir("/proc/self/fd")))
    import json
    files = {{name: getattr(module, "__file__", None) for name, module in sys.modules.items()}}
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    answer = {{"modules": files, "path": sys.path, "environment": dict(os.environ), "status": lines,
               "argv": sys.orig_argv, "open": opened}}
    with open(__file__ + ".json", "w") as file:
        json.dump(answer, file)
    from glasshouse.wire.crypto import RecipientKey
    return RecipientKey.generate()

runpy.run_path({PROGRAM!r}, run_name="custodian")["main"](key)
"""
# Still as exec left it, until the file is gone.
OPEN_TO_READERS = f"""
import os, runpy, time
while os.path.exists(__file__ + ".wait"):
    time.sleep(0.01)
runpy.run_path({PROGRAM!r}, run_name="custodian")["main"]()
"""

NO_RELEASE = Request(deployment="00" * 16, group=None, info=b"", line=None, manifest_sha256=bytes(32), sealed_key=b"")


@pytest.fixture
def package(tmp_path: Path) -> OwnersPackage:
    return seal(tmp_path / "job.sealed", {"data.bin": bytes(range(256))}, job={"entry": "train.py"})


@contextmanager
def custodian(package: OwnersPackage, program: str = PROGRAM) -> Iterator[Custodian]:
    with package.path.open("rb", buffering=0) as stream, closing(Regions.for_package(package.manifest)) as regions:
        started = Custodian.start(
            Loop(), stream.fileno(), regions, pycache_prefix=sys.pycache_prefix or "", program=program
        )
        try:
            yield started
        finally:
            started.dismiss()


def written(tmp_path: Path, program: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(program)
    return str(path)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a custodian sees of itself when it is ready to make its key."""
    folder = tmp_path_factory.mktemp("listed")
    package = seal(folder / "job.sealed", {"data.bin": bytes(range(256))}, job={"entry": "train.py"})
    with custodian(package, written(folder, LISTING)) as started:
        assert len(started.public()) == HPKE_PUBLIC_BYTES
    return dict(json.loads((folder / "program.py.json").read_text()))


def test_it_loads_what_is_counted_as_trusted_with_the_package_key(listed: dict[str, dict[str, str]]) -> None:
    ours = {name for name in listed["modules"] if name.partition(".")[0] == "glasshouse"}
    counted = closure(TIERS[0].roots) - {"glasshouse.custodian.__main__"}  # which runs under another name
    assert ours == counted
    assert {name.split(".")[1] for name in ours if "." in name} == {"custodian", "errors", "package", "wire"}


def test_it_imports_files_that_the_agent_measures_and_no_others(listed: dict[str, dict[str, str]]) -> None:
    places = tuple(str(Path(module.__file__ or "").parent) + "/" for module in (os, glasshouse, cryptography))
    foreign = {name for name, file in listed["modules"].items() if file is not None and not file.startswith(places)}
    assert foreign <= {"_cffi_backend", "__main__"}  # the latter is this test's
    assert "site" not in listed["modules"]
    searched = {Path(path).resolve() for path in listed["path"]}
    assert not searched & {Path(path).resolve() for path in site.getsitepackages()}
    assert all(path.is_relative_to(Path(os.__file__).resolve().parents[1]) for path in searched)


def test_nothing_secret_is_on_its_command_line_or_in_its_environment(
    listed: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch, package: OwnersPackage
) -> None:
    argv = list(listed["argv"])
    assert argv[1:5] == ["-I", "-S", "-B", "-X"]
    assert argv[6].endswith("program.py")
    assert argv[7] == str(os.getpid())
    assert {word.partition("=")[0] for word in argv[8:]} <= {"_cffi_backend", "cryptography"}
    assert set(listed["environment"]) <= {"LANG", "LC_CTYPE", "LD_LIBRARY_PATH"}
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("GLASSHOUSE_TOKEN", "a secret of the user's")
    with custodian(package) as started:
        assert len(started.public()) == HPKE_PUBLIC_BYTES


def test_it_holds_no_descriptor_but_those_that_it_was_given(listed: dict[str, dict[str, str]]) -> None:
    # With one for each of the two regions, another for its mapping, that of a checkpoint, and the one that listed them.
    assert list(map(int, listed["open"])) == list(range(5 + 2 + 2 + 1 + 1))


def test_its_memory_is_locked_where_the_limit_allows(listed: dict[str, dict[str, str]]) -> None:
    if not int(listed["status"]["CapEff"], 16) >> 14 & 1:
        pytest.skip("this machine gives no CAP_IPC_LOCK")
    assert int(listed["status"]["VmLck"].split()[0]) > 0


def test_no_other_process_of_its_user_reads_it(package: OwnersPackage) -> None:
    def refused(pid: int) -> list[str]:
        found = []
        for name in ("mem", "environ", "maps"):
            try:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
            except PermissionError:
                found.append(name)
        return found

    def story() -> list[list[str]]:
        # Without a capability on either side: the kernel would refuse by those alone.
        REAL.drop_capabilities()
        with custodian(package) as started, subprocess.Popen(["sleep", "60"]) as open_to_readers:
            started.public()
            found = [refused(open_to_readers.pid), refused(started.pid)]
            open_to_readers.kill()
            return found

    assert in_child(story) == [[], ["mem", "environ", "maps"]]


def test_just_after_exec_it_has_no_descriptor_of_secret_memory(tmp_path: Path, package: OwnersPackage) -> None:
    """Others of its user can open or copy its descriptors then, and what they took outlives its closing."""
    program = written(tmp_path, OPEN_TO_READERS)
    waiting = Path(program + ".wait")
    waiting.touch()
    with custodian(package, program) as started:
        executed = Path(f"/proc/{started._executed}")
        wait_for(lambda: program.encode() in (executed / "cmdline").read_bytes())
        held = {int(one.name): str(one.readlink()) for one in (executed / "fd").iterdir()}
        assert started._regions is not None
        regions = (started._regions.grant, started._regions.patterns)
        assert not {str(Path(f"/proc/self/fd/{one.fd}").readlink()) for one in regions} & set(held.values())
        assert held[3].startswith("socket:")
        assert held[4] == str(package.path)
        waiting.unlink()
        assert len(started.public()) == HPKE_PUBLIC_BYTES
        assert started._regions is None, "they are sent once"


def test_a_descriptor_of_its_memory_opened_just_after_exec_reads_no_key(tmp_path: Path, package: OwnersPackage) -> None:
    program = written(tmp_path, OPEN_TO_READERS)
    waiting = Path(program + ".wait")
    waiting.touch()
    with custodian(package, program) as started:
        executed = started._executed
        wait_for(lambda: program.encode() in Path(f"/proc/{executed}/cmdline").read_bytes())
        line = Path(f"/proc/{executed}/maps").read_text().splitlines()[0]
        start = int(line.partition("-")[0], 16)
        memory = os.open(f"/proc/{executed}/mem", os.O_RDONLY)
        try:
            assert os.pread(memory, 4, start) == b"\x7fELF"
            waiting.unlink()
            started.public()
            assert started.pid not in (0, executed)
            assert os.pread(memory, 4, start) == b""  # that memory is gone, and the keys were never in it
        finally:
            os.close(memory)


@needs_tracing
def test_a_tracer_that_follows_from_exec_to_fork_is_given_no_key(tmp_path: Path, package: OwnersPackage) -> None:
    program = written(tmp_path, OPEN_TO_READERS)
    waiting = Path(program + ".wait")
    waiting.touch()
    with custodian(package, program) as started:
        tracer = Tracer(started._executed, stopping=False, follow=True)
        try:
            waiting.unlink()
            with pytest.raises(InternalError):
                started.public()
        finally:
            tracer.close()


def test_it_ends_with_the_agent(package: OwnersPackage) -> None:
    def agent() -> int:
        with custodian(package) as started:
            started.public()
            os.write(writer, started.pid.to_bytes(4, "big"))
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    reader, writer = os.pipe()
    with pytest.raises(Exception, match="the child ended with -9"):
        in_child(agent)
    pid = int.from_bytes(os.read(reader, 4), "big")
    os.close(reader)
    os.close(writer)
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_a_program_whose_agent_is_another_makes_no_key(tmp_path: Path, package: OwnersPackage) -> None:
    orphan = f"""
import runpy, sys
sys.argv[1] = "1"
runpy.run_path({PROGRAM!r}, run_name="custodian")["main"]()
"""
    with custodian(package, written(tmp_path, orphan)) as started, pytest.raises(InternalError):
        started.public()


def test_the_signals_that_end_a_run_do_not_end_it(package: OwnersPackage) -> None:
    with custodian(package) as started:
        started.public()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(started.pid, number)
        with pytest.raises(Exception, match="not the key of this package"):
            started.open(replace(NO_RELEASE, sealed_key=bytes(1200), manifest_sha256=package.manifest.sha256))


def test_where_no_program_can_be_executed_there_is_no_run(
    package: OwnersPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(PlatformError) as caught, custodian(package):
        pass
    assert caught.value.code is Code.PLATFORM


FAULTS = {
    "no such program": None,
    "one that ends at once": "",
    "one that fails": "raise SystemExit(1)",
    "one without a key": "import os; os.write(3, os.getpid().to_bytes(4, 'big'))",
    "a key that is none": "import os; os.write(3, os.getpid().to_bytes(4, 'big')); os.write(3, b'key')",
    "words instead": "import os; os.write(3, b'hello')",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_that_does_not_do_its_work_is_an_error_of_ours(
    tmp_path: Path, package: OwnersPackage, fault: str
) -> None:
    text = FAULTS[fault]
    program = str(tmp_path / "missing.py") if text is None else written(tmp_path, text)
    with custodian(package, program) as started:
        with pytest.raises(InternalError) as caught:
            started.public()
        assert caught.value.code is Code.INTERNAL


def test_an_answer_that_is_none_is_an_error_of_ours(tmp_path: Path, package: OwnersPackage) -> None:
    answers = f"os.write(3, bytes(4)); os.write(3, bytes({HPKE_PUBLIC_BYTES})); os.read(3, 9); os.write(3, b'{{}}')"
    program = f"import os; {answers}"
    with custodian(package, written(tmp_path, program)) as started:
        started.public()
        with pytest.raises(InternalError):
            started.open(NO_RELEASE)


@pytest.mark.parametrize("moment", ["at once", "before its fork", "with its key"])
def test_it_can_be_ended_at_every_moment_and_leaves_no_process(
    tmp_path: Path, package: OwnersPackage, moment: str
) -> None:
    program = PROGRAM
    if moment == "before its fork":
        program = written(tmp_path, OPEN_TO_READERS)
        Path(program + ".wait").touch()
    with custodian(package, program) as started:
        if moment == "with its key":
            started.public()
        processes = [started._executed, started.pid]
        started.dismiss()
        started.dismiss()
        for pid in filter(None, processes):
            assert not Path(f"/proc/{pid}").exists()
        assert started.pid == 0


@needs_root
def test_a_process_that_is_no_child_of_the_agents_is_not_ended_for_it(tmp_path: Path, package: OwnersPackage) -> None:
    # Root could end any.
    with custodian(package, written(tmp_path, "import os; os.write(3, (1).to_bytes(4, 'big'))")) as started:
        with pytest.raises(InternalError):
            started.public()
        started.dismiss()
        assert Path("/proc/1").exists()
