"""Measures opening and sealing a package against the bare cipher, a plain read, `cp` and `age`, in one run.

Laws: the arms take turns, so that drift meets all of them; the numbers are medians; every raw time is
kept. One core means that the whole process is pinned to one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from glasshouse.errors import Code, InternalError, UsageError
from glasshouse.package.content import ContentHash, content_hash
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES, VERSION
from glasshouse.package.read import Package
from glasshouse.package.write import Source, write
from glasshouse.wire.aead import PREFIX_BYTES, TAG_BYTES, ChunkCipher, Suite
from glasshouse.wire.hpke import RecipientKey
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.signing import SigningKey

__all__ = ["run"]

DEFAULT_BYTES = 1 << 30
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - storage that is memory is the point
# Sealing on one core meets its bar by rate, or by its part of the bare cipher on a slower machine.
BARS = {"open_to_cipher": 0.5, "open_to_age": 4.0, "seal_gb_per_s": 1.3, "seal_two_cores_to_one": 1.7}
SEAL_TO_CIPHER = 0.35
MAX_READER_BYTES = 64 << 20


def run(
    *,
    size_bytes: int = DEFAULT_BYTES,
    repeats: int = 5,
    suite: Suite = Suite.AES_256_GCM,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure one asset of random bytes.

    Args:
        size_bytes: the asset's size; about four times as much memory is needed.
        repeats: rounds, after one that is thrown away.
        suite: the cipher under test.
        folder: where the files lie; memory-backed storage by default.

    Returns:
        `rates_gb_per_s`, `ratios`, `reader_memory_bytes`, `bars` and the raw seconds of every round.

    Raises:
        UsageError: there is not enough room, or `repeats` is not positive.
    """
    place = folder or (MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir()))
    if repeats < 1 or size_bytes < 1:
        raise UsageError(Code.USAGE, "the benchmark needs at least one byte and one round")
    if shutil.disk_usage(place).free < 4 * size_bytes:
        raise UsageError(Code.USAGE, f"{place} has no room for {4 * size_bytes} bytes", hint="use a smaller --size")
    with tempfile.TemporaryDirectory(dir=place, prefix="glasshouse-bench-") as name:
        bench = _Bench(folder=Path(name), size=size_bytes, suite=suite)
        bench.prepare()
        for number in range(repeats + 1):
            bench.round(keep=number > 0)
        memory = bench.reader_memory()
    return _report(bench, place=place, memory=memory)


@dataclass(kw_only=True)
class _Bench:
    folder: Path
    size: int
    suite: Suite
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Write the asset, seal it once, and encrypt it with age where that is installed."""
        self.plain, self.sealed, self.key = self.folder / "plain", self.folder / "sealed", os.urandom(32)
        block = os.urandom(min(self.size, 1 << 24))
        with self.plain.open("wb") as out:
            for at in range(0, self.size, len(block)):
                out.write(block[: self.size - at])
        self.owner, self.recipient = SigningKey.generate(), RecipientKey.generate().public
        self.destination = bytearray(self.size)
        self.cipher = ChunkCipher(
            suite=self.suite, key=os.urandom(32), prefix=bytes(PREFIX_BYTES), associated_data=bytes(40)
        )
        self.age = _prepare_age(self.folder, self.plain)

    def round(self, *, keep: bool) -> None:
        """Run every arm once; sealing comes first, because the others open what it made."""
        arms: list[tuple[str, Callable[[], float], bool]] = [
            ("seal", self._seal, False),
            ("seal_one_core", self._seal, True),
            ("cp", self._cp, True),
            ("copy", self._copy, True),
            ("open", self._open, True),
            ("cipher", self._cipher, True),
            ("cipher_seal", self._cipher_seal, True),
            ("blake3", lambda: self._hash(content_hash(VERSION)), True),
            ("sha256", lambda: self._hash(hashlib.sha256()), True),
        ]
        if self.age is not None:
            arms += [
                ("age", self._age, True),
                ("age_discarded", self._age_discarded, True),
                ("age_seal", self._age_seal, True),
            ]
        for name, arm, alone in arms:
            with _one_core() if alone else contextlib.nullcontext():
                seconds = arm()
            if keep:
                self.seconds.setdefault(name, []).append(seconds)

    def reader_memory(self) -> int:
        """Return the most memory that reading took beyond the destination."""
        with self._package() as (package, _):
            index = package.unlock(self.key)
            tracemalloc.start()
            try:
                package.asset(index.assets[0], self.key).read_into(0, self.destination)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    def _seal(self) -> float:
        """Seal over the file of the round before: new pages of memory would be measured instead."""
        self.sealed.touch()
        with self.sealed.open("r+b", buffering=0) as out:
            begin = time.perf_counter()
            write(
                out,
                sources=[Source(path="asset", bytes=self.size, open=lambda: self.plain.open("rb", buffering=0))],
                job={},
                workload="mlp",
                floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD),
                owner=self.owner,
                owner_sealing=self.recipient,
                recipients=[self.recipient],
                package_key=self.key,
                package_id=os.urandom(16).hex(),
                suite=self.suite,
            )
            return time.perf_counter() - begin

    def _open(self) -> float:
        """From the closed file to all bytes in the destination: header, signature and index included."""
        with self._package() as (package, begin):
            index = package.unlock(self.key)
            with package.asset(index.assets[0], self.key) as reader:
                reader.read_into(0, self.destination)
            return time.perf_counter() - begin

    def _copy(self) -> float:
        begin = time.perf_counter()
        with self.plain.open("rb", buffering=0) as stream:
            _fill(stream, self.destination)
        return time.perf_counter() - begin

    def _cp(self) -> float:
        """Copy the file to the same storage, the kernel's way, over the copy of the round before, as `_seal` does."""
        copied = self.folder / "copied"
        copied.touch()
        begin = time.perf_counter()
        with self.plain.open("rb", buffering=0) as stream, copied.open("r+b", buffering=0) as out:
            while hasattr(os, "sendfile") and os.sendfile(out.fileno(), stream.fileno(), None, 1 << 30):
                pass
            shutil.copyfileobj(stream, out, 1 << 20)  # what is left of it, or all where files cannot be sent to files
        seconds = time.perf_counter() - begin
        if copied.stat().st_size != self.size:
            raise InternalError(Code.INTERNAL, "a copy of another length than its original")
        return seconds

    def _cipher(self) -> float:
        """Open as many bytes with the bare cipher, from one chunk in the cache to another."""
        plain = bytearray(min(self.size, DEFAULT_CHUNK_BYTES))
        sealed = bytearray(len(plain) + TAG_BYTES)
        self.cipher.seal_into(0, last=False, plaintext=plain, out=sealed)
        begin = time.perf_counter()
        for _ in range(0, self.size, len(plain)):
            self.cipher.open_into(0, last=False, sealed=sealed, out=plain)
        return time.perf_counter() - begin

    def _cipher_seal(self) -> float:
        """Seal as many bytes with the bare cipher, from one chunk in the cache to another."""
        plain = bytearray(min(self.size, DEFAULT_CHUNK_BYTES))
        sealed = bytearray(len(plain) + TAG_BYTES)
        begin = time.perf_counter()
        for _ in range(0, self.size, len(plain)):
            self.cipher.seal_into(0, last=False, plaintext=plain, out=sealed)
        return time.perf_counter() - begin

    def _hash(self, digest: ContentHash) -> float:
        """Hash as many bytes, from one chunk in the cache."""
        plain = bytearray(min(self.size, DEFAULT_CHUNK_BYTES))
        begin = time.perf_counter()
        for _ in range(0, self.size, len(plain)):
            digest.update(plain)
        return time.perf_counter() - begin

    def _age(self) -> float:
        """Decrypt with age into the destination, as a program must that wants the plaintext in memory."""
        begin = time.perf_counter()
        with subprocess.Popen(self._age_command(), stdout=subprocess.PIPE, bufsize=0) as process:
            pipe = cast("io.FileIO", process.stdout)
            with contextlib.suppress(OSError, AttributeError):  # the largest pipe that anyone may have
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
            _fill(pipe, self.destination)
        if process.returncode:
            raise InternalError(Code.INTERNAL, "age did not decrypt what it had encrypted")
        return time.perf_counter() - begin

    def _age_discarded(self) -> float:
        """Decrypt with age and throw the plaintext away: the most that age itself can do."""
        begin = time.perf_counter()
        subprocess.run(self._age_command(), check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    def _age_seal(self) -> float:
        """Encrypt the file with age, over the result of the round before."""
        begin = time.perf_counter()
        subprocess.run(self._age_program().seal, check=True)
        return time.perf_counter() - begin

    def _age_command(self) -> list[str]:
        return self._age_program().open

    def _age_program(self) -> _Age:
        if self.age is None:
            raise InternalError(Code.INTERNAL, "age is not installed")
        return self.age

    @contextlib.contextmanager
    def _package(self) -> Iterator[tuple[Package, float]]:
        begin = time.perf_counter()
        with self.sealed.open("rb") as stream:
            yield Package.open(stream, owner_signing=self.owner.public), begin


def _fill(stream: io.FileIO, destination: bytearray) -> None:
    view, done = memoryview(destination), 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise InternalError(Code.INTERNAL, "a stream that ends too early")
        done += count


@dataclass(frozen=True, kw_only=True, slots=True)
class _Age:
    """The commands of an installed age, and what it calls itself."""

    version: str
    seal: list[str]
    open: list[str]


def _prepare_age(folder: Path, plain: Path) -> _Age | None:
    """Encrypt the asset with age; return the commands that do and undo it, or None where age is not installed."""
    age, keygen = shutil.which("age"), shutil.which("age-keygen")
    if age is None or keygen is None:
        return None
    identity, sealed = folder / "age.key", folder / "plain.age"
    subprocess.run([keygen, "-o", str(identity)], check=True, stderr=subprocess.DEVNULL)
    recipient = subprocess.run([keygen, "-y", str(identity)], check=True, stdout=subprocess.PIPE, text=True)
    seal = [age, "-r", recipient.stdout.strip(), "-o", str(sealed), str(plain)]
    subprocess.run(seal, check=True)
    version = subprocess.run([age, "--version"], check=False, stdout=subprocess.PIPE, text=True).stdout.strip()
    return _Age(version=version[:64], seal=seal, open=[age, "-d", "-i", str(identity), str(sealed)])


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Pin this process, and what it starts, to one core where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _report(bench: _Bench, *, place: Path, memory: int) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in bench.seconds.items()}
    rates = {name: round(bench.size / seconds / 1e9, 3) for name, seconds in medians.items()}
    ratios = {
        f"open_to_{name}": round(medians[name] / medians["open"], 3)
        for name in ("cipher", "copy", "age", "age_discarded")
        if name in medians
    } | {
        f"seal_to_{name}": round(medians[arm] / medians["seal_one_core"], 3)
        for name, arm in (("cipher", "cipher_seal"), ("cp", "cp"), ("age", "age_seal"))
        if arm in medians
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {**ratios, "seal_gb_per_s": rates["seal_one_core"]}
    if cores > 1 and hasattr(os, "sched_setaffinity"):
        found["seal_two_cores_to_one"] = round(medians["seal_one_core"] / medians["seal"], 3)
    bars: dict[str, Any] = {
        name: {"at_least": least, "found": found[name], "met": found[name] >= least}
        for name, least in BARS.items()
        if name in found
    }
    bars["seal_gb_per_s"]["met"] |= ratios["seal_to_cipher"] >= SEAL_TO_CIPHER
    bars["reader_memory_bytes"] = {"at_most": MAX_READER_BYTES, "found": memory, "met": memory <= MAX_READER_BYTES}
    return {
        # Said where it is missing: a comparison that was not made must not look like one that was.
        "age": "not found" if bench.age is None else bench.age.version,
        "bars": bars,
        "bytes": bench.size,
        "chunk_bytes": DEFAULT_CHUNK_BYTES,
        "cores": cores,
        "one_core_pinned": hasattr(os, "sched_setaffinity"),
        "rates_gb_per_s": rates,
        "ratios": ratios,
        "reader_memory_bytes": memory,
        "seconds": {name: [round(value, 6) for value in values] for name, values in bench.seconds.items()},
        "storage": str(place),
        "suite": bench.suite.value,
    }
