"""Reference values of a release, signed by its maker: what a bundle's files measure to (spec/key-release.md, 5.7).

Law: they cover Glasshouse and its ciphers and nothing else; without a key that was named for them none is accepted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.jobs.owner.home import MAX_STATE_BYTES, read_bounded
from glasshouse.jobs.places.runtime_bundle import bundled_files
from glasshouse.wire import dsse
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.record import IDENTIFIER, Identifier, Record, choice, digest, table, text

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
    """Return a release's reference values from a file.

    Args:
        signed_by: the public key that has to have signed it, in hex.

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
