"""A hostile dependency with plaintext in hand looks for anything that a disk would keep of it."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
import types
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.runtime import syscalls
from glasshouse.runtime.confine import file_trials, read_only_package
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.worker import sandbox, shown_paths
from glasshouse.runtime.worker.sandbox import Worker
from tools.forked import in_child
from tools.machine import (
    WithoutMounts,
    WithoutNamespaces,
    WithoutSeccomp,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
)
from tools.sandboxed import WORKSPACE_BYTES, Ran, first_message, run, specification

pytestmark = needs_filters

SEALED = os.urandom(70_000)

# Takes the package as a worker does, and leaves bits of it wherever a file keeps more than its content.
ATTACK = """
import array, ctypes, fcntl, json, os, socket, sys
link = socket.socket(fileno=3)
package = socket.recv_fds(link, 1, 1)[1][0]
libc = ctypes.CDLL(None, use_errno=True)
def tried(what):
    try:
        answer = what()
    except OSError as error:
        return error.errno
    return 0
flags = array.array('l', [0])
attacks = {}
for name, target in {'package': package, 'shown': PATH, 'null': '/dev/null', 'stdin': 0}.items():
    attacks[name] = {
        'utime': tried(lambda: os.utime(target, ns=(19480101, 17990000))),
        'chmod': tried(lambda: os.chmod(target, 0o640)),
        'xattr': tried(lambda: os.setxattr(target, 'user.canary', b'malignant')),
        'trusted': tried(lambda: os.setxattr(target, 'security.canary', b'malignant')),
        'chown': tried(lambda: os.chown(target, os.getuid(), os.getgid())),
        'truncate': tried(lambda: os.truncate(target, 17)),
    }
attacks['package'] |= {
    'flags': tried(lambda: fcntl.ioctl(package, 0x40086602, flags)),
    'lease': tried(lambda: fcntl.fcntl(package, 1024, 0)),
    'hint': tried(lambda: fcntl.fcntl(package, 1036, bytes([5]) + bytes(7))),
    'write': tried(lambda: os.write(package, b'malignant')),
    'again': tried(lambda: os.write(os.open(f'/proc/self/fd/{package}', os.O_RDWR), b'malignant')),
    'append': tried(lambda: fcntl.fcntl(package, 4, os.O_APPEND) or os.write(package, b'x')),
}
print(json.dumps({'attacks': attacks, 'same': os.pread(package, 1 << 20, 0).hex(), 'rest': sys.stdin.read()}))
"""


@pytest.mark.parametrize("times", [5, 1000], ids=["now and then", "each time"])
def test_a_folder_that_another_process_changes_in_that_moment_is_not_taken_for_one_that_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    numbers = iter(range(times))

    def refused(target: object, *_: object, **__: object) -> None:
        number = next(numbers, None) if target == str(tmp_path) else None
        if number is not None:
            (tmp_path / str(number)).mkdir()
        raise OSError(errno.EROFS, "a mount that is read-only")

    for name in ("utime", "chmod", "chown"):
        monkeypatch.setattr(os, name, refused)
    found = file_trials.metadata(REAL, package=None, paths=[str(tmp_path)])
    assert ("shown-times" in found) is (times == 1000)


@pytest.mark.parametrize("tick_ns", [4_000_000, 10**9], ids=["a tick of 4 ms", "a tick of a second"])
def test_a_folder_whose_times_can_be_set_is_found_where_the_clock_of_its_file_system_is_coarse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tick_ns: int
) -> None:
    real, waited = os.stat, [time.time_ns()]

    def coarse(target: object, **given: object) -> object:
        found = real(target, **given)  # type: ignore[call-overload]
        noted = changed[0] // tick_ns * tick_ns
        facts = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return types.SimpleNamespace(**{**facts, "st_ctime_ns": noted})

    changed = [waited[0]]
    for name in ("utime", "chmod", "chown"):
        monkeypatch.setattr(os, name, lambda *_, **__: changed.__setitem__(0, waited[0]))
    monkeypatch.setattr(os, "stat", coarse)
    monkeypatch.setattr(time, "time_ns", lambda: waited[0])
    monkeypatch.setattr(time, "sleep", lambda s: waited.__setitem__(0, waited[0] + int(s * 10**9)))
    assert "shown-times" in file_trials.metadata(REAL, package=None, paths=[str(tmp_path)])


def kept(path: Path) -> tuple[object, ...]:
    """Return all that a file system keeps of a file, but when it was last read."""
    found = path.stat()
    held = (found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return (*held, *((name, os.getxattr(path, name)) for name in os.listxattr(path)))


def kept_of_null() -> tuple[object, ...]:
    """Return what is kept of a device that every process has: other tests try theirs at the same time, as it is."""
    found = Path("/dev/null").stat()
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns


def attack(package: Path, shown: Path, **changes: object) -> tuple[Ran, dict[str, dict[str, int]], dict[str, object]]:
    def hand_over(worker: Worker) -> dict[str, object]:
        socket.send_fds(worker.link, [b"x"], [worker.package])
        return {
            "kind": read_only_package.kind(REAL, worker.package),
            "offset": os.lseek(opened.fileno(), 0, os.SEEK_CUR),
        }

    with package.open("rb", buffering=0) as opened:
        ran = run(
            ATTACK.replace("PATH", repr(str(shown))),
            after=hand_over,
            package=opened.fileno(),
            read_paths=(*shown_paths.default_read_paths(), str(shown)),
            **changes,  # type: ignore[arg-type]
        )
    said = json.loads(ran.output or "{}")
    assert said, ran.errors
    assert bytes.fromhex(said["same"]) == SEALED
    assert said["rest"] == ""
    return ran, said["attacks"], ran.facts


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "job.sealed"
    path.write_bytes(SEALED)
    return path


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    path = tmp_path / "shown"
    path.write_text("to be read")
    return path


@needs_namespaces
@needs_landlock
def test_nothing_is_left_on_a_disk_by_way_of_the_package_a_shown_file_or_a_device(package: Path, shown: Path) -> None:
    before = kept(package), kept(shown), kept_of_null()
    ran, attacks, facts = attack(package, shown)
    assert (kept(package), kept(shown), kept_of_null()) == before
    assert facts["kind"] == read_only_package.MOUNT
    assert {name: done for name, done in attacks["package"].items() if not done} == {}
    assert {name: done for name, done in attacks["shown"].items() if not done} == {}
    assert attacks["null"]["utime"] == attacks["null"]["chmod"] == 30  # EROFS
    assert ran.report.observed["metadata-closed"] is CheckResult.PASSED
    assert "sealed-package" not in ran.report.notes


@pytest.mark.parametrize("kernel", [WithoutMounts(), WithoutNamespaces()], ids=["no-mounts", "no-namespaces"])
def test_where_nothing_can_be_mounted_the_package_is_memory_and_the_machines_files_stay_as_they_are(
    kernel: WithoutMounts | WithoutNamespaces, package: Path, shown: Path
) -> None:
    before = kept(package), kept(shown), kept_of_null()
    ran, attacks, facts = attack(package, shown, kernel=kernel)
    assert (kept(package), kept(shown), kept_of_null()) == before
    assert facts["kind"] == read_only_package.MEMORY
    # What changes a file's content is refused; what sets its times and mode is answered and not done.
    assert not {"write", "again", "append", "xattr", "trusted", "flags", "lease", "hint", "truncate"} & {
        name for name, done in attacks["package"].items() if not done
    }
    assert ran.report.observed["metadata-closed"] is CheckResult.PASSED
    assert "sealed-package" in ran.report.notes


def test_a_package_without_room_beside_the_workspace_is_refused_before_anything_is_released(tmp_path: Path) -> None:
    large = tmp_path / "large.sealed"
    large.touch()
    os.truncate(large, WORKSPACE_BYTES)

    def story() -> tuple[object, bytes]:
        from tools.sandboxed import forking

        with large.open("rb", buffering=0) as opened:
            worker = sandbox.start(specification("", package=opened.fileno()), spawn=forking(WithoutMounts()))
            message = first_message(worker)
            worker.end()
            return message, os.read(worker.stderr, 4096)

    message, said = in_child(story)
    assert message == {"code": "out-of-memory", "type": "failed"}
    assert b"8388608 bytes of memory" in said


@needs_namespaces
def test_the_copy_counts_as_part_of_the_workspace(package: Path) -> None:
    big = package.with_name("big.sealed")
    big.write_bytes(bytes(4 << 20))
    with big.open("rb", buffering=0) as opened:
        big.rename(package)  # its name leads elsewhere: what was opened is copied
        big.write_bytes(b"another")
        code = f"with open('file', 'wb') as file: file.write(bytes({WORKSPACE_BYTES - (4 << 20) + 1}))"
        ran = run(code, package=opened.fileno(), after=lambda worker: {"size": os.fstat(worker.package).st_size})
    assert "sealed-package" not in ran.report.notes  # the kernel follows the rename
    assert ran.facts["size"] == 4 << 20
    with package.open("rb", buffering=0) as opened:
        package.unlink()
        package.write_bytes(b"another")
        ran = run(code, package=opened.fileno(), after=lambda worker: {"size": os.fstat(worker.package).st_size})
    assert "sealed-package" in ran.report.notes
    assert ran.facts["size"] == 4 << 20
    assert "No space left on device" in ran.errors


ORDINARY = """
import os, shutil, subprocess, sys, tarfile, tempfile, zipfile
open('a', 'w').write('text')
os.utime('a', (1_000_000_000, 1_000_000_000)); os.chmod('a', 0o700)
shutil.copy2('a', 'b'); shutil.copy('a', 'c'); shutil.copytree('.', tempfile.gettempdir() + '/tree')
with tarfile.open('t.tar', 'w') as archive: archive.add('a')
with tarfile.open('t.tar') as archive: archive.extractall('out')
with zipfile.ZipFile('z.zip', 'w') as archive: archive.write('a')
with zipfile.ZipFile('z.zip') as archive: archive.extractall('unzipped')
subprocess.run(['cp', '-a', 'a', 'd'], check=True)
os.truncate('c', 2) if FULL else os.ftruncate(os.open('c', os.O_RDWR), 2)
with open('/dev/null', 'w') as nowhere: nowhere.write('x')
print([open(name).read() for name in 'abcd'], int(os.stat('b').st_mtime) == 1_000_000_000, oct(os.stat('d').st_mode))
"""


@needs_namespaces
@needs_landlock
def test_scripts_copy_unpack_and_set_times_and_modes_in_their_workspace() -> None:
    ran = run(ORDINARY.replace("FULL", "True"))
    assert (ran.errors, ran.output) == ("", "['text', 'text', 'te', 'text'] True 0o100700\n")


@needs_landlock
def test_scripts_copy_and_unpack_where_times_and_modes_stay_as_they_are() -> None:
    ran = run(ORDINARY.replace("FULL", "False"), kernel=WithoutMounts())
    assert ran.errors.count("\n") == 1  # the launcher's own, on the missing private root
    assert ran.output == "['text', 'text', 'te', 'text'] False 0o100600\n"


# A call that reached the kernel would find that this is no descriptor.
BROUGHT_TO_DISK = """
import ctypes, fcntl, os, sqlite3
libc = ctypes.CDLL(None, use_errno=True)
calls = [('fsync', -1), ('fdatasync', -1), ('syncfs', -1)]
calls += [('sync_file_range', -1, 0, 0, 7), ('posix_fadvise', -1, 0, 0, 4)]
print([getattr(libc, name)(*arguments) for name, *arguments in calls], libc.syscall(SETUP, 0, 0), ctypes.get_errno())
with open('file', 'wb') as file:
    os.fsync(file.fileno())
def tried(what):
    try:
        return what() and 0
    except OSError as error:
        return error.errno
past, here = os.O_RDONLY | os.O_DIRECT, os.open('file', os.O_RDONLY)
print([tried(lambda: os.open(name, past)) for name in ('file', os.__file__)], libc.syscall(OPEN, b'file', past))
print(tried(lambda: fcntl.fcntl(here, fcntl.F_SETFL, os.O_DIRECT)), fcntl.fcntl(here, fcntl.F_SETFL, os.O_NONBLOCK))
print(libc.madvise(0, 0, 25), ctypes.get_errno(), libc.madvise(0, 0, 4))
"""


@needs_namespaces
@needs_landlock
@pytest.mark.parametrize("kernel", [REAL, WithoutMounts()], ids=["isolated", "no-mounts"])
def test_a_script_brings_nothing_that_others_wrote_to_a_disk_and_is_told_that_it_did(kernel: Kernel) -> None:
    """Eight bytes of plaintext left through the times of a journal's commits, which `syncfs` on the package caused."""
    setup, by_name = (syscalls.number(name, os.uname().machine) for name in ("io_setup", "open"))
    # Where there is no such call, a number that none has.
    ran = run(BROUGHT_TO_DISK.replace("SETUP", str(setup)).replace("OPEN", str(by_name or 9999)), kernel=kernel)
    past_the_cache = f"[{errno.EINVAL}, {errno.EINVAL}] -1\n{errno.EINVAL} 0\n-1 {errno.EINVAL} 0\n"
    assert ran.output == f"[0, 0, 0, 0, 0] -1 {errno.ENOSYS}\n{past_the_cache}", ran.errors


UNNAMED = """
import errno, os, tempfile
made, refused = set(), []
for folder in (FOLDER, '.'):
    before = os.stat(os.open('count-a', os.O_CREAT | os.O_RDWR)).st_ino if folder == '.' else 0
    for mode in range(20):
        try:
            os.open(folder, os.O_TMPFILE | os.O_RDWR, mode)
        except OSError as error:
            refused.append(error.errno)
    if folder == '.':
        made.add(os.stat(os.open('count-b', os.O_CREAT | os.O_RDWR)).st_ino - before)
with tempfile.TemporaryFile() as file:
    file.write(b'ordinary')
print(set(refused) == {errno.EOPNOTSUPP}, len(refused), made)
"""


@needs_namespaces
@needs_landlock
@pytest.mark.parametrize("kernel", [REAL, WithoutMounts()], ids=["isolated", "no-mounts"])
def test_no_file_without_a_name_is_made_anywhere(kernel: Kernel, tmp_path: Path) -> None:
    """Landlock refuses it when it is made already: a disk keeps its mode, and an overlay copies its folder."""
    tmp_path.chmod(0o777)
    before = tmp_path.stat()
    elsewhere = repr(str(tmp_path)) if isinstance(kernel, WithoutMounts) else "tempfile.gettempdir()"
    ran = run(UNNAMED.replace("FOLDER", elsewhere), kernel=kernel)
    assert ran.output == "True 40 {1}\n", ran.errors
    assert tmp_path.stat() == before


CONTROLS = """
import ctypes, errno, fcntl, multiprocessing, os, shutil, socket, struct, subprocess, termios
def size(descriptor):
    return struct.unpack('i', fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
assert not os.isatty(0) and subprocess.run(['tty'], capture_output=True).stdout == b'not a tty\\n'
assert not os.isatty(os.open('a', os.O_CREAT | os.O_RDWR))
out, into = os.pipe()
os.write(into, b'abcd')
one, other = socket.socketpair()
other.send(b'12345')
assert (size(out), size(one.fileno())) == (4, 5)
fcntl.ioctl(out, termios.FIOCLEX), fcntl.ioctl(out, termios.FIONCLEX), fcntl.ioctl(out, termios.FIONBIO, bytes(4))
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init()
libc.inotify_add_watch(watch, b'.', 0x100)
with open('b', 'wb') as file:
    file.write(bytes(100_000))
    os.posix_fallocate(file.fileno(), 0, 200_000)
assert size(watch) > 0
try:
    fcntl.ioctl(os.open('a', os.O_RDWR), 0x40049409, os.open('b', os.O_RDONLY))
except OSError as error:
    assert error.errno == errno.EOPNOTSUPP
shutil.copyfile('b', 'c')
for way in ('auto', 'never'):
    subprocess.run(['cp', '--reflink=' + way, '--sparse=always', 'b', 'd'], check=True)
fcntl.flock(os.open('d', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
with multiprocessing.get_context('fork').Pool(2) as pool:
    print(pool.map(abs, [-1, -2]), os.path.getsize('c'), os.path.getsize('d'))
"""


@needs_namespaces
@needs_landlock
def test_pipes_sockets_watches_and_copies_are_controlled_as_ever() -> None:
    ran = run(CONTROLS)
    assert (ran.errors, ran.output) == ("", "[1, 2] 200000 200000\n")


@needs_namespaces
def test_without_filters_what_still_takes_is_noticed(package: Path, shown: Path) -> None:
    with package.open("rb", buffering=0) as opened:
        ran = run("", kernel=WithoutSeccomp(), package=opened.fileno())
    assert ran.report.observed["metadata-closed"] is CheckResult.FAILED
    assert {"open-package-lease", "open-package-hint", "open-sync", "open-unnamed"} <= set(ran.report.notes)


@needs_root
def test_the_trials_find_each_of_these_where_nothing_stands_against_them(package: Path, shown: Path) -> None:
    with package.open("rb", buffering=0) as opened:
        found = file_trials.metadata(REAL, package=opened.fileno(), paths=[str(shown), str(shown.parent / "missing")])
    everything = {"package-descriptor", "package-lease", "package-times", "package-write", "shown-times", "sync"}
    everything |= {"package-direct", "shown-direct", "unnamed"}
    assert everything <= set(found)
    assert package.read_bytes() == SEALED
    assert stat.S_IMODE(shown.stat().st_mode) == 0o644 - (0o044 & _umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_descriptor_for_writing_is_no_view_of_a_package(package: Path) -> None:
    with package.open("r+b") as writable, package.open("rb") as readable:
        assert read_only_package.kind(REAL, writable.fileno()) is None
        assert read_only_package.kind(REAL, readable.fileno()) is None
        copy = read_only_package.sealed_copy(REAL, readable.fileno())
        assert readable.tell() == 0
    try:
        assert read_only_package.kind(REAL, copy) == read_only_package.MEMORY
        with pytest.raises(OSError, match="not permitted"):
            os.truncate(f"/proc/self/fd/{copy}", 1)
        assert os.pread(copy, 1 << 20, 0) == SEALED
    finally:
        os.close(copy)


@needs_landlock
@pytest.mark.parametrize("kernel", [WithoutMounts(), REAL], ids=["nothing mounted", "private root"])
@pytest.mark.parametrize("number", [0x40086604, 0x5000940E, 0x40047211, 0x4004F50D, 0x6609, 0x80086601])
def test_no_control_of_a_file_system_is_reached(tmp_path: Path, number: int, kernel: Kernel) -> None:
    """ext4's older number for a version, btrfs's new folder, FAT's attributes, f2fs's pin, ext4's other form, flags."""
    code = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
word = ctypes.create_string_buffer(4096)
assert libc.ioctl(os.open({str(tmp_path)!r}, os.O_RDONLY), ctypes.c_ulong({number}), word) == -1
print(errno.errorcode[ctypes.get_errno()])
"""
    ran = run(code, kernel=kernel, read_paths=(*specification("").read_paths, str(tmp_path)))
    assert (ran.output.strip(), ran.report.observed["metadata-closed"]) == ("ENOTTY", CheckResult.PASSED)
