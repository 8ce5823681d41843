"""Sealing and opening a package beside the bare cipher, a plain read, `cp` and `age`: ``make bench-package``.

Laws: the arms take turns, so that drift meets all of them; ratios are of medians of one run; every raw time is kept.
One core means that the whole process, with what it starts, is pinned to one.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import timeit
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from benchmarks.kept import Bar, finish, kept, options
from glasshouse.package.content import content_hash
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES, VERSION
from glasshouse.package.read import Package
from glasshouse.package.write import Source, write
from glasshouse.wire.crypto import PREFIX_BYTES, TAG_BYTES, ChunkCipher, RecipientKey, SigningKey, Suite
from glasshouse.wire.policy import Assurance, Floor, Profile

MEMORY_FOLDER = Path("/dev/shm")
BARS = {
    "open_to_cipher": Bar(0.5, least=True),
    "open_to_age": Bar(4.0, least=True),
    "seal_two_cores_to_one": Bar(1.7, least=True),
    "reader_memory_mib": Bar(64.0),
}
SEAL_GB_PER_S, SEAL_TO_CIPHER = 1.3, 0.35  # by rate or, on a slower machine, by its part of the bare cipher
RATIOS = {  # whose rate over which arm's
    "open_to_cipher": ("open", "cipher"),
    "open_to_copy": ("open", "copy"),
    "open_to_age": ("open", "age"),
    "open_to_age_discarded": ("open", "age_discarded"),
    "seal_to_cipher": ("seal_one_core", "cipher_seal"),
    "seal_to_cp": ("seal_one_core", "cp"),
    "seal_to_age": ("seal_one_core", "age_seal"),
    "seal_two_cores_to_one": ("seal", "seal_one_core"),
}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the asset; four times as much room is needed")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all arms, after one that is thrown away")
    parser.add_argument("--folder", type=Path, help="where the files lie; storage that is memory by default")
    asked = parser.parse_args()
    place = asked.folder or (MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir()))
    size = asked.mib << 20
    if size < 1 or asked.rounds < 1 or not place.is_dir() or shutil.disk_usage(place).free < 4 * size:
        parser.error(f"{place} must be a folder that has room for 4 × --mib, and --mib and --rounds must be positive")
    with tempfile.TemporaryDirectory(dir=place, prefix="glasshouse-bench-") as folder:
        arms = Arms(Path(folder), size)
        _, *turns = [dict(arms.turn()) for _ in range(asked.rounds + 1)]
        seconds = {name: [turn[name] for turn in turns] for name in turns[0]}
        memory = arms.reader_memory_bytes()
    return finish(result(size, seconds, memory, age=arms.age_version), asked.output)


def result(size: int, seconds: dict[str, list[float]], memory_bytes: int, *, age: str) -> dict[str, Any]:
    """Return what is kept: rates and ratios of the medians of every arm's seconds."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rates = {f"{name}_gb_per_s": round(size / median / 1e9, 3) for name, median in medians.items()}
    ratios = {
        name: round(medians[beside] / medians[arm], 3)
        for name, (arm, beside) in RATIOS.items()
        if beside in medians and arm in medians
    }
    numbers = {**ratios, "reader_memory_mib": round(memory_bytes / 2**20, 2), **rates}
    least = min(SEAL_GB_PER_S, SEAL_TO_CIPHER * rates["cipher_seal_gb_per_s"])
    bars = {"seal_one_core_gb_per_s": Bar(round(least, 3), least=True), **BARS}
    # A comparison that was not made must not look like one that was met: `age` names what is missing.
    made = {name: bar for name, bar in bars.items() if name in numbers}
    print(f"{size / 2**20:g} MiB, medians of {len(seconds['open'])} rounds; age: {age}")
    return kept(numbers, made, age=age, bytes=size, chunk_bytes=DEFAULT_CHUNK_BYTES, seconds=seconds)


def seal(
    out: BinaryIO,
    source: Source,
    *,
    owner: SigningKey,
    recipient: bytes,
    key: bytes,
    suite: Suite = Suite.AES_256_GCM,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> None:
    """Seal one asset into a package of its own."""
    write(
        out,
        sources=[source],
        job={},
        workload="script",
        floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD),
        owner=owner,
        owner_sealing=recipient,
        recipients=[recipient],
        package_key=key,
        package_id=os.urandom(16).hex(),
        suite=suite,
        chunk_bytes=chunk_bytes,
    )


class Arms:
    """The ways to seal, copy and open one asset of random bytes in a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._plain, self._sealed, self._key = folder / "plain", folder / "sealed", os.urandom(32)
        block = os.urandom(min(size, 1 << 24))
        with self._plain.open("wb") as out:
            for at in range(0, size, len(block)):
                out.write(block[: size - at])
        self._owner, self._recipient = SigningKey.generate(), RecipientKey.generate().public
        self._destination = bytearray(size)
        self._chunk = bytearray(min(size, DEFAULT_CHUNK_BYTES))
        self._sealed_chunk = bytearray(len(self._chunk) + TAG_BYTES)
        self._cipher = ChunkCipher(
            suite=Suite.AES_256_GCM, key=os.urandom(32), prefix=bytes(PREFIX_BYTES), associated_data=bytes(40)
        )
        self._cipher.seal_into(0, last=False, plaintext=self._chunk, out=self._sealed_chunk)
        self.age_version = "not found"
        if shutil.which("age") and shutil.which("age-keygen"):
            self._prepare_age()

    def turn(self) -> Iterator[tuple[str, float]]:
        """Run every arm once; sealing comes first, because the others open what it made."""
        digest, chunk, sealed = content_hash(VERSION), self._chunk, self._sealed_chunk
        # As many bytes as the asset has, from one chunk in the cache to another.
        chunks = range(0, self._size, len(chunk))
        arms: dict[str, Callable[[], object]] = {
            "seal_one_core": self._seal,
            "cp": self._cp,
            "copy": self._copy,
            "open": self._open,
            "cipher": lambda: [self._cipher.open_into(0, last=False, sealed=sealed, out=chunk) for _ in chunks],
            "cipher_seal": lambda: [self._cipher.seal_into(0, last=False, plaintext=chunk, out=sealed) for _ in chunks],
            "blake3": lambda: [digest.update(chunk) for _ in chunks],
        }
        if self.age_version != "not found":
            arms |= {"age": self._age, "age_discarded": self._age_discarded, "age_seal": self._age_seal}
        if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
            yield "seal", timeit.timeit(self._seal, number=1)
        for name, arm in arms.items():
            with _one_core():
                seconds = timeit.timeit(arm, number=1)
            yield name, seconds

    def reader_memory_bytes(self) -> int:
        """Return the most memory that reading took beyond the destination."""
        tracemalloc.start()
        try:
            self._open()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def _seal(self) -> None:
        """Seal over the file of the round before: new pages of memory would be measured instead."""
        source = Source(path="asset", bytes=self._size, open=lambda: self._plain.open("rb", buffering=0))
        self._sealed.touch()
        with self._sealed.open("r+b", buffering=0) as out:
            seal(out, source, owner=self._owner, recipient=self._recipient, key=self._key)

    def _open(self) -> None:
        """From the closed file to all bytes in the destination: header, signature and index included."""
        with self._sealed.open("rb") as stream:
            package = Package.open(stream, owner_signing=self._owner.public)
            with package.asset(package.unlock(self._key).assets[0], self._key) as reader:
                reader.read_into(0, self._destination)

    def _copy(self) -> None:
        with self._plain.open("rb", buffering=0) as stream:
            _fill(stream, self._destination)

    def _cp(self) -> None:
        """Copy to the same storage, the kernel's way, over the copy of the round before, as `_seal` does."""
        copied = self._folder / "copied"
        copied.touch()
        with self._plain.open("rb", buffering=0) as stream, copied.open("r+b", buffering=0) as out:
            while hasattr(os, "sendfile") and os.sendfile(out.fileno(), stream.fileno(), None, 1 << 30):
                pass
            shutil.copyfileobj(stream, out, 1 << 20)  # what is left of it, or all where files cannot be sent to files
        if copied.stat().st_size != self._size:
            raise RuntimeError("a copy of another length than its original")

    def _age(self) -> None:
        """Decrypt with age into the destination, as a program must that wants the plaintext in memory."""
        with subprocess.Popen(self._age_open, stdout=subprocess.PIPE, bufsize=0) as process:
            pipe = cast("io.FileIO", process.stdout)
            with contextlib.suppress(OSError, AttributeError):  # the largest pipe that any user may have
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
            _fill(pipe, self._destination)
        if process.returncode:
            raise RuntimeError("age did not decrypt what it had encrypted")

    def _age_discarded(self) -> None:
        """Decrypt with age and throw the plaintext away: the most that age itself can do."""
        subprocess.run(self._age_open, check=True, stdout=subprocess.DEVNULL)

    def _age_seal(self) -> None:
        """Encrypt the file with age, over the result of the round before."""
        subprocess.run(self._age_seal_command, check=True)

    def _prepare_age(self) -> None:
        identity, sealed = str(self._folder / "age.key"), str(self._folder / "plain.age")
        subprocess.run(["age-keygen", "-o", identity], check=True, stderr=subprocess.DEVNULL)
        recipient = subprocess.run(["age-keygen", "-y", identity], check=True, stdout=subprocess.PIPE, text=True)
        self._age_seal_command = ["age", "-r", recipient.stdout.strip(), "-o", sealed, str(self._plain)]
        self._age_open = ["age", "-d", "-i", identity, sealed]
        subprocess.run(self._age_seal_command, check=True)
        version = subprocess.run(["age", "--version"], check=False, stdout=subprocess.PIPE, text=True)
        self.age_version = version.stdout.strip()[:64] or "of no version"


def _fill(stream: io.FileIO, destination: bytearray) -> None:
    view, done = memoryview(destination), 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise RuntimeError("a stream that ends too early")
        done += count


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Pin this process, and what it starts, to one core where the system can."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    if before:
        os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


if __name__ == "__main__":
    sys.exit(main())
