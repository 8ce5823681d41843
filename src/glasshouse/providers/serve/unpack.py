"""Has a bundle on this machine, and answers where: the owner's ssh runs this with the machine's own Python.

Arguments: the place's folder (``-`` for the user's own), the bundle's SHA-256, its size, a nonce. It answers on a line
of its own ``glasshouse-bundle NONCE have PATH`` where it is here already, and ``… send FROM`` where it is not; then it
reads the bundle from that byte on from standard input, and answers ``… have PATH`` or ``… no WHY``. PATH is the
interpreter with Glasshouse.

Laws: nothing but the standard library is imported, for nothing else need be there; a bundle has its name only when it
was whole, had its digest and ran; a part is worth nothing but the time of sending it again, and two that send it at
once write the same bytes to the same places; nothing outside the place's folder is written.
"""

# pathlib would be another import for nothing; the syntax is that of Python 3.8, so that an old one is refused in words.
# ruff: noqa: PTH103, PTH108, PTH110, PTH111, PTH112, PTH118, PTH120, PTH123, PTH100, PTH104, PTH208, PTH211
from __future__ import annotations

import compileall
import hashlib
import json
import os
import re
import shutil
import site
import stat
import subprocess
import sys
import time
import zipfile
from io import FileIO
from typing import BinaryIO, Callable  # noqa: UP035 - as above

MAX_BYTES = 512 << 20
MANIFEST = "bundle.json"
_MAX_MEMBERS = 20_000
_MEMBER = re.compile(r"site-packages(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)+")
# Whatever modules it has: in a bundle that an earlier version made they lie elsewhere.
_TRY = """
import _cffi_backend, blake3, glasshouse.providers, glasshouse.runtime, importlib, pkgutil
for room in (glasshouse.providers, glasshouse.runtime):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
"""
_TRY_S = 120
_PIECE_BYTES = 1 << 20
_UNUSED_S = 24 * 3600


class RefusedBundle(Exception):  # noqa: N818 - an answer to the owner
    """This machine cannot use the bundle, for the reason in the text."""


def unpack(archive: BinaryIO, goal: str) -> None:
    """Make an environment of a bundle, without pip.

    Raises:
        RefusedBundle: it is not for this machine, or is none.
        OSError: it cannot be written.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with zipfile.ZipFile(archive) as bundle:
        if not is_bundle(bundle):
            raise RefusedBundle("it is no bundle, or has more in it than one may")
        members = bundle.infolist()
        of = json.loads(bundle.read(MANIFEST))
        for what, found in (("system", os.uname().sysname), ("machine", os.uname().machine), ("python", version)):
            if not isinstance(of, dict) or of.get(what) != found:
                raise RefusedBundle(f"it is for {what} {of.get(what)}, and this machine has {found}")
        library = os.path.join(goal, "lib", f"python{version}")
        for member in members[1:]:
            path = os.path.join(library, *member.filename.split("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with bundle.open(member) as source, open(path, "xb") as out:
                shutil.copyfileobj(source, out)
    _environment(goal, os.path.join(library, "site-packages"), version)


def is_bundle(archive: zipfile.ZipFile) -> bool:
    """Return whether an archive's members are those of a bundle, by number, size and names."""
    members = archive.infolist()
    names = [member.filename for member in members]
    few = len(members) <= _MAX_MEMBERS and sum(member.file_size for member in members) <= MAX_BYTES
    return few and names[:1] == [MANIFEST] and len(set(names)) == len(names) and all(map(_MEMBER.fullmatch, names[1:]))


def _environment(goal: str, packages: str, version: str) -> None:
    """Add what makes an environment of a folder: a link to the interpreter, and where else packages are found.

    The machine's own packages, of which torch is one, are paths in a `.pth` file: no start-up code of theirs is run.
    """
    base = str(getattr(sys, "_base_executable", "") or sys.executable)
    os.makedirs(os.path.join(goal, "bin"))
    os.symlink(base, os.path.join(goal, "bin", "python"))
    with open(os.path.join(goal, "pyvenv.cfg"), "x") as out:
        out.write(f"home = {os.path.dirname(base)}\ninclude-system-site-packages = false\nversion = {version}\n")
    with open(os.path.join(packages, "machine.pth"), "x") as out:
        out.writelines(f"{path}\n" for path in site.getsitepackages() if os.path.isdir(path) and "\n" not in path)
    # For the programs beside the runtime, which itself reads none of it.
    compileall.compile_dir(packages, quiet=2)


def install(folder: str, digest: str, size: int, source: BinaryIO, say: Callable[[int], None]) -> str:
    """Return the interpreter of a bundle, which is read from `source` where it is not here; others that lie idle go.

    Args:
        folder: the place's, made if need be.
        source: read from after `say` was called.
        say: asks for the bundle, from the byte on that it is given.

    Raises:
        RefusedBundle: it cannot be used here.
        OSError: it cannot be written.
    """
    if not re.fullmatch("[0-9a-f]{64}", digest) or not 0 < size <= MAX_BYTES:
        raise RefusedBundle("it is no bundle")
    for path in (folder, os.path.join(folder, "runtimes")):
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise RefusedBundle(f"{path} is not this user's own folder, which no other may write to")
    goal = os.path.join(folder, "runtimes", digest)
    python = os.path.join(goal, "bin", "python")
    if os.path.isdir(goal):
        os.utime(goal)  # it is used: none that makes room takes it away
        return python
    _sweep(folder, digest)
    scratch = f"{goal}.{os.urandom(8).hex()}.new"  # a container that starts anew counts its processes anew too
    with open(os.open(goal + ".part", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b", buffering=0) as part:
        try:
            _receive(part, size, source, say)
        except OSError:
            _remove(goal + ".part")  # on a disk that is full it would be in the way
            raise
        try:
            if _digest(part) != digest:
                raise RefusedBundle("it was damaged on its way")
            unpack(part, scratch)
            _try(os.path.join(scratch, "bin", "python"))
            try:
                os.rename(scratch, goal)
            except OSError:
                if not os.path.isdir(goal):  # else another was faster, with the same
                    raise
        finally:
            _remove(scratch)
            _remove(goal + ".part")
    return python


def _receive(part: FileIO, size: int, source: BinaryIO, say: Callable[[int], None]) -> None:
    """Take what is not there of a bundle; a line that breaks leaves the rest for another."""
    have = min(part.seek(0, os.SEEK_END), size)
    part.seek(have)
    say(have)
    while have < size:
        data = source.read(min(size - have, _PIECE_BYTES))
        if not data:
            raise RefusedBundle("it did not come whole")
        have += len(data)
        while data:
            data = data[part.write(data) :]


def _digest(part: FileIO) -> str:
    seen = hashlib.sha256()
    part.seek(0)
    for piece in iter(lambda: part.read(_PIECE_BYTES), b""):
        seen.update(piece)
    return seen.hexdigest()


def _sweep(folder: str, digest: str) -> None:
    """Remove the other bundles, and parts of some, that were not asked for in a day, unless a run may use one."""
    runs, kept = os.path.join(folder, "runs"), os.path.join(folder, "runtimes")
    if os.path.isdir(runs) and not all(os.path.exists(os.path.join(runs, run, "ended")) for run in os.listdir(runs)):
        return
    for name in os.listdir(kept):
        path, gone = os.path.join(kept, name), os.path.join(kept, f"{name}.{os.urandom(8).hex()}.gone")
        try:
            if name != f"{digest}.part" and os.lstat(path).st_mtime < time.time() - _UNUSED_S:
                os.rename(path, gone)  # what is removed in part is not there for another
                _remove(gone)
        except FileNotFoundError:
            pass  # another connection was faster


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _try(python: str) -> None:
    """See that what was unpacked runs on this machine: its native code may want another library than there is."""
    command = [python, "-I", "-B", "-c", _TRY]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRY_S, check=False)
    if tried.returncode:
        lines = tried.stderr.decode("utf-8", "replace").strip().splitlines()
        raise RefusedBundle(f"it does not run here: {lines[-1] if lines else 'it printed nothing'}")


def main(arguments: list[str]) -> int:
    """Answer the owner, and return 0 when the bundle is here."""
    folder, digest, size, nonce = arguments
    usual = os.path.join(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"), "glasshouse-place")
    folder = usual if folder == "-" else os.path.abspath(os.path.expanduser(folder))

    def say(words: str) -> None:
        sys.stdout.write(f"\nglasshouse-bundle {nonce} {words}\n")
        sys.stdout.flush()

    try:
        say("have " + install(folder, digest, int(size), sys.stdin.buffer, lambda have: say(f"send {have}")))
    except (RefusedBundle, OSError, ValueError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        say("no " + " ".join(str(error).split())[:500])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[-4:]))
