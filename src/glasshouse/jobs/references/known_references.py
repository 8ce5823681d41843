"""Installations that an owner accepts: what was recorded of each by name, file by file (docs/adr/0028), and releases.

Laws: another machine's account of its files is recorded only when the owner asks for it; a difference is reported and
decides nothing: the gate compares evidence with what is recorded. Values of a release, signed by
its maker (spec/key-release.md, 5.7), cover Glasshouse and its ciphers and nothing else; without a key that was named
for them none is accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from glasshouse.attestation.measurements.measured import PARTS, Measured, References, digest_of_part
from glasshouse.attestation.measurements.measurement import measure_runtime, measured_files
from glasshouse.errors import Code, FormatError, PeerError, RefusedError, UsageError, VerificationError
from glasshouse.jobs.owner.home import MAX_STATE_BYTES, Home, is_there, private_folder, read_bounded, write_private
from glasshouse.jobs.places.runtime_bundle import bundled_files
from glasshouse.providers.place.base import Place
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.record import IDENTIFIER, Identifier, Record, choice, digest, table, text

THIS = "this"
"""The name of this installation, which is accepted where a job names no other."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".json"
_NAMED, _NAME_CHARS = 3, 200  # differing files that a refusal names, and how much of each name

# The files of each part, or of those that a release has: name → SHA-256.
Files = Mapping[str, Mapping[str, bytes]]
_FILES = table(len(PARTS), choice(PARTS), table(1 << 20, text(4096), digest()), min_items=1)
RELEASED_TYPE = "application/vnd.glasshouse.reference-values+json"
MAX_RELEASED_BYTES = 2 * MAX_STATE_BYTES
_SUFFIXES = (".py", ".pyc", ".so", ".dylib")
_BELOW = r"(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)+"
_NAMES = {
    "cryptography": re.compile(rf"(blake3|cryptography){_BELOW}|_cffi_backend\.[A-Za-z0-9._+-]+"),
    "glasshouse": re.compile(rf"glasshouse{_BELOW}"),
}
_PYTHON = re.compile(r"3\.[1-9][0-9]?")
_MAX_DISTRIBUTIONS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A file in which an installation is another than a reference."""

    part: str  # whose file it is
    name: str  # the file, as the specification names it
    how: str  # `changed`, `missing` or `more`, as seen from the reference


def measured_at(place: Place) -> Files:
    """Return the files that this installation, or a machine by its own account, is measured by."""
    if not isinstance(place, SshPlace):
        return measured_files()
    files: dict[str, dict[str, bytes]] = {part: {} for part in PARTS}
    try:
        listed = place.measured_files()
    except FormatError as error:
        raise PeerError(Code.SCHEMA, f"{place.name} answered with what is no list of files: {error.message}") from None
    for both, sha256 in listed.items():
        part, _, name = both.partition("/")
        if part not in files or not name:
            raise PeerError(Code.SCHEMA, f"{place.name} names a file of no part: {both[:80]!r}")
        files[part][name] = sha256
    return files


def known_references(home: Home) -> dict[str, Files]:
    """Return what was recorded, by name; raises `UsageError` for a damaged record."""
    if not home.references.is_dir():
        return {}
    names = sorted(path.stem for path in home.references.iterdir() if path.suffix == _SUFFIX)
    return {name: reference(home, name) for name in names}


def reference(home: Home, name: str) -> Files:
    """Return what was recorded under a name, or this installation's files for `THIS`; raises `UsageError`."""
    if name == THIS:
        return measured_files()
    path = home.references / f"{name}{_SUFFIX}"
    if not _NAME.fullmatch(name) or not is_there(path):
        raise UsageError(
            Code.USAGE,
            f"no reference is called {name[:64]!r}",
            hint="see: glasshouse reference list; record one with: glasshouse reference add NAME --on MACHINE",
        )
    try:
        found: Files = _FILES.read(decode(read_bounded(path, what="reference"), max_bytes=MAX_STATE_BYTES), "reference")
        return found
    except FormatError:
        raise UsageError(Code.USAGE, f"the reference {path} is damaged", hint="record it again with --force") from None


def parts_of(files: Files) -> dict[str, bytes]:
    """Return the digest of each part that a reference has."""
    return {part: digest_of_part(part, files[part]) for part in PARTS if part in files}


def add_reference(home: Home, name: str, files: Files, *, replace: bool = False) -> None:
    """Record an installation under a name; raises `UsageError` for a name that is none, or taken."""
    if not _NAME.fullmatch(name) or name == THIS:
        raise UsageError(Code.USAGE, f"not a name for a reference: {name[:64]!r}")
    record = encode(_FILES.write(files))
    if len(record) > MAX_STATE_BYTES:
        raise UsageError(Code.TOO_LARGE, "that installation has more files than a reference may list")
    write_private(private_folder(home.references) / f"{name}{_SUFFIX}", record, replace=replace)


def remove_reference(home: Home, name: str) -> Files:
    """Forget a reference and return what it was; raises `UsageError`."""
    files = reference(home, name)
    if name == THIS:
        raise UsageError(Code.USAGE, f"{THIS} is this installation, which is no record")
    (home.references / f"{name}{_SUFFIX}").unlink()
    return files


def accepted(home: Home, names: Sequence[str]) -> References:
    """Return what a deployment accepts of each part; without names, this installation's alone. Raises `UsageError`."""
    known = [parts_of(reference(home, name)) for name in names or (THIS,)]
    digests = {part: {one[part] for one in known if part in one} for part in PARTS}
    for part, found in digests.items():
        if not found:
            raise UsageError(
                Code.POLICY_IMPOSSIBLE,
                f"none of the references {', '.join(names)} has the part {part}: a release has no interpreter",
                hint="name one beside it that has, of an image or a machine: glasshouse reference add NAME --tree DIR",
            )
    try:
        return References(**{part: tuple(sorted(found)) for part, found in digests.items()})
    except FormatError as error:
        raise UsageError(error.code, error.message) from None


def differences(files: Files, recorded: Files) -> list[Difference]:
    """Return the files in which an installation differs from a reference, of the parts that the reference has."""
    how = {(False, True): "missing", (True, False): "more", (True, True): "changed"}
    return [
        Difference(part=part, name=name, how=how[name in files[part], name in recorded[part]])
        for part in PARTS
        if part in recorded
        for name in sorted({*files[part], *recorded[part]})
        if files[part].get(name) != recorded[part].get(name)
    ]


@contextlib.contextmanager
def check_places(
    home: Home, places: Sequence[Place], references: References, names: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """Compare what machines measure to with the references `names`, beside other work, before anything is sent there.

    Yields a function that waits for all answers, and raises `RefusedError` (`measurement-unknown`), naming part and
    file, `PeerError` or `PlatformError`.
    """
    # Where no other is named this installation is the reference.
    machines = {place.name: place for place in places if names or isinstance(place, SshPlace)}
    pool = ThreadPoolExecutor(max_workers=max(1, len(machines)))
    checks = [pool.submit(_check, home, place, references, names) for place in machines.values()]

    def wait() -> None:
        for one in checks:
            one.result()

    try:
        yield wait
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _check(home: Home, place: Place, references: References, names: Sequence[str]) -> None:
    try:
        measured = Measured.from_json(place.measurement()) if isinstance(place, SshPlace) else measure_runtime()
    except FormatError as error:
        raise PeerError(Code.SCHEMA, f"{place.name} answered with what is no measurement: {error.message}") from None
    part = references.unknown(measured)
    if part is None:
        return
    there = measured_at(place)
    recorded = {name: reference(home, name) for name in names or (THIS,)}
    found = {
        name: [one for one in differences(there, files) if one.part == part]
        for name, files in recorded.items()
        if part in files
    }
    nearest = min(found, key=lambda name: len(found[name]))
    files = found[nearest]
    listed = ", ".join(f"{one.name[:_NAME_CHARS]} ({one.how})" for one in files[:_NAMED])
    if ":" in place.name:  # rented for this run, and given back right away
        accept = (
            "record its image, without running it: glasshouse reference add NAME --tree DIR --bundle BUNDLE, or a "
            "machine that you keep and that runs the same: glasshouse reference add NAME --on MACHINE"
        )
    else:
        accept = (
            f"see all of them: glasshouse measure --on {place.name} --diff {nearest}; if you trust that installation: "
            f"glasshouse reference add NAME --on {place.name}, or --tree DIR of its unpacked image"
        )
    raise RefusedError(
        Code.MEASUREMENT_UNKNOWN,
        f"{place.name} has another {part} than the reference {nearest}: {len(files)} files differ, {listed}"
        + (", …" if len(files) > _NAMED else "")
        + "; nothing was released",
        hint=f'{accept}; and then [policy] reference = ["NAME"] in the job',
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Released(Record, name="reference values", max_bytes=MAX_RELEASED_BYTES):
    """What the files of a release measure to.

    Law: ``Released.verified(r.sign(key).encode(), signed_by=key.public) == r``.
    """

    python: Annotated[str, text(pattern=_PYTHON)]  # what its native code is for
    machine: Identifier
    distributions: Annotated[Mapping[str, str], table(_MAX_DISTRIBUTIONS, text(), text(128, IDENTIFIER))]  # versions
    # Of `glasshouse`, and where they are part of the release of `cryptography`: name → SHA-256. A part that a release
    # does not determine is refused: its signer does not vouch for interpreters.
    files: Annotated[
        Mapping[str, Mapping[str, bytes]],
        table(len(_NAMES), choice(_NAMES), table(1 << 20, text(500), digest(), min_items=1)),
    ]

    def __post_init__(self) -> None:
        if "glasshouse" not in self.files:
            raise FormatError(Code.SCHEMA, "reference values without files of glasshouse")
        for part, names in self.files.items():
            if not all(map(_NAMES[part].fullmatch, names)):
                raise FormatError(Code.SCHEMA, f"reference values with a file that is none of {part}")

    @classmethod
    def of_bundle(cls, path: Path) -> Released:
        """Return the values of what is in a bundle; raises `UsageError` for what is none."""
        bundle, files = bundled_files(path)
        measured = {name: hashlib.sha256(data).digest() for name, data in files.items() if name.endswith(_SUFFIXES)}
        return cls(
            python=bundle.python,
            machine=bundle.machine,
            distributions=bundle.distributions,
            files={
                part: {name: digest for name, digest in measured.items() if pattern.fullmatch(name)}
                for part, pattern in _NAMES.items()
            },
        )

    def sign(self, key: SigningKey) -> dsse.Envelope:
        """Return it signed."""
        return dsse.sign(RELEASED_TYPE, self.encode(), [key])

    @classmethod
    def verified(cls, data: bytes, *, signed_by: bytes) -> Released:
        """Verify an envelope by a raw Ed25519 public key and return what was signed; raises `FormatError`."""
        envelope = dsse.Envelope.parse(data, max_bytes=MAX_RELEASED_BYTES)
        return cls.parse(envelope.verify(RELEASED_TYPE, signed_by))


def read_released(path: Path, *, signed_by: str) -> Released:
    """Return a release's reference values from a file that the public key in hex `signed_by` has to have signed.

    Raises:
        UsageError: `file-missing`, `too-large`; `usage`: not a key.
        VerificationError: it is damaged, not such a file, or not signed by that key.
    """
    if not re.fullmatch("[0-9a-f]{64}", signed_by):
        raise UsageError(
            Code.USAGE,
            "--signed-by is not 64 small hexadecimal digits",
            hint="it is the signing key of who made the release, from where they publish it, not from beside the file",
        )
    data = read_bounded(path, max_bytes=MAX_RELEASED_BYTES, what="file of reference values")
    try:
        return Released.verified(data, signed_by=bytes.fromhex(signed_by))
    except FormatError as error:
        raise VerificationError(
            error.code,
            f"nothing in {path} is accepted: {error.message}",
            hint="get file and key again from who made the release; a key that came with the file proves nothing",
        ) from None
