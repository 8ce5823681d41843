"""The owner's end of having a bundle on a machine: sent once, on lines that break too (spec/place.md, section 9)."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.providers.place.ways import hint_of
from glasshouse.providers.serve import unpack

_MARK = "glasshouse-bundle"
_LINE_BYTES, _LINES = 4096, 256
_FROM = re.compile("[0-9]{1,10}")
# Until the first answer; until it is unpacked and tried there; the slowest line that is waited for.
_FIRST_S, _LAST_S, _SLOWEST_BYTES_S = 60.0, 300.0, 20_000
# The machine's Python reads the script from standard input, and then, through it, the bundle.
_LOADER = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv[1])), 'unpack.py', 'exec'))"


def install(way: Callable[[Sequence[str]], list[str]], name: str, bundle: Path, *, python: str, folder: str) -> str:
    """Have a bundle on a machine and return the interpreter there that has Glasshouse.

    Args:
        way: returns the command here that runs a command there.
        name: the machine's, for people.
        python: the interpreter there that it is unpacked for.

    Raises:
        UsageError: `file-missing` or `too-large`: the bundle cannot be read.
        PeerError: `place-unreachable`: the machine cannot be reached, or answers otherwise than it should.
        PlatformError: it cannot use the bundle, and why.
    """
    try:
        size, digest = bundle.stat().st_size, digest_of(bundle)
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the bundle {bundle}: {error.strerror}") from None
    if size > unpack.MAX_BYTES:
        raise UsageError(Code.TOO_LARGE, f"{bundle} is longer than a bundle may be")
    script, nonce = inspect.getsource(unpack).encode(), secrets.token_hex(16)
    arguments = (str(len(script)), folder, digest, str(size), nonce)
    command = way((python, "-I", "-B", "-c", _LOADER, *arguments))
    with _started(command) as process:
        assert process.stdin and process.stdout  # noqa: S101, PT018 - asked for below
        with _within(process, _FIRST_S):
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(script)
                process.stdin.flush()
            answer, printed = _answer(process.stdout, nonce)
        if answer[:1] == ["send"] and len(answer) == 2 and _FROM.fullmatch(answer[1]):
            with _within(process, _LAST_S + size / _SLOWEST_BYTES_S):
                with contextlib.suppress(BrokenPipeError), bundle.open("rb") as source:
                    source.seek(int(answer[1]))
                    shutil.copyfileobj(source, process.stdin, 1 << 20)
                    process.stdin.flush()
                answer, printed = _answer(process.stdout, nonce)
    if answer[:1] == ["no"]:
        hint = "make one for it: glasshouse runtime bundle --help; or install Glasshouse there"
        raise PlatformError(Code.PLATFORM, f"{name} cannot use the bundle: {' '.join(answer[1:])}", hint=hint)
    path = " ".join(answer[1:])
    if answer[:1] != ["have"] or not path.startswith("/"):
        ended = "the connection ended while it was sent: see whether the machine stays up and its disk has room"
        why = f"{name} does not take the bundle{printed}"
        raise PeerError(Code.PLACE_UNREACHABLE, why, hint=hint_of(printed, ended))
    return path


def digest_of(bundle: Path) -> str:
    """Return the SHA-256 of a bundle, hexadecimal: what unpacks it has nothing but the standard library."""
    with bundle.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _answer(out: IO[bytes], nonce: str) -> tuple[list[str], str]:
    """Return the words of the next answer, and for an error what was printed last; none where there is no answer."""
    last = ""
    for _ in range(_LINES):
        line = out.readline(_LINE_BYTES).decode("utf-8", "replace")
        if not line:
            break
        words = line.split()
        if words[:2] == [_MARK, nonce]:
            return words[2:], ""
        last = line.strip() or last
    return [], f"; it printed: {last[:300]}" if last else ""


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as long as the block lasts; raises `PeerError`."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise PeerError(Code.PLACE_UNREACHABLE, f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None  # noqa: S101 - asked for above
                stream.close()


@contextlib.contextmanager
def _within(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """End a process that takes longer than the block may: then nothing more comes from it."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
