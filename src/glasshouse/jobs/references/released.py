"""Reference values of a release, signed by who made it: what a bundle's files measure to (spec/key-release.md, 5.7).

Law: it vouches for Glasshouse and its ciphers and for nothing else, whatever its signer says; without a key that was
named for it nothing is believed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.jobs.owner.files import MAX_STATE_BYTES, read_bounded
from glasshouse.jobs.places.runtime_bundle import bundled_files
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields
from glasshouse.wire.signing import SigningKey

__all__ = ["MAX_RELEASED_BYTES", "RELEASED_TYPE", "Released", "read_released"]

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
class Released:
    """What the files of a release measure to.

    Law: ``Released.parse(r.sign(key).encode(), signed_by=key.public) == r``.
    """

    python: str  # what its native code is for, as a bundle says it
    machine: str
    distributions: Mapping[str, str]  # name → version of what is in it
    # Of `glasshouse`, and where they are part of the release of `cryptography`: name → SHA-256.
    files: Mapping[str, Mapping[str, bytes]]

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
        files: dict[str, Json] = {
            part: {name: digest.hex() for name, digest in names.items()} for part, names in self.files.items()
        }
        payload: dict[str, Json] = {
            "distributions": dict(self.distributions),
            "files": files,
            "machine": self.machine,
            "python": self.python,
        }
        return dsse.sign(RELEASED_TYPE, encode(payload), [key])

    @classmethod
    def parse(cls, data: bytes, *, signed_by: bytes) -> Released:
        """Verify the signature and return what was signed.

        Args:
            data: an envelope's canonical bytes.
            signed_by: the raw Ed25519 public key that has to have signed, alone.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `schema-invalid`, `too-large` or `not-canonical`.
        """
        payload = dsse.Envelope.parse(data, max_bytes=MAX_RELEASED_BYTES).verify(RELEASED_TYPE, signed_by)
        fields = Fields(decode(payload, max_bytes=MAX_RELEASED_BYTES), "reference values")
        distributions, files = fields.any("distributions"), fields.child("files")
        if not isinstance(distributions, dict) or len(distributions) > _MAX_DISTRIBUTIONS:
            raise FormatError(Code.SCHEMA, f"reference values of more than {_MAX_DISTRIBUTIONS} distributions")
        versions = Fields(distributions, "reference values.distributions")
        released = cls(
            python=fields.text("python", pattern=_PYTHON),
            machine=fields.identifier("machine"),
            distributions={name: versions.identifier(name) for name in distributions},
            # A part that a release does not determine is refused by `end`: its signer is not asked about interpreters.
            files={part: _files(files.any(part), part) for part in _NAMES if part == "glasshouse" or files.has(part)},
        )
        files.end()
        fields.end()
        return released


def _files(value: Json, part: str) -> dict[str, bytes]:
    if not isinstance(value, dict) or not value:
        raise FormatError(Code.SCHEMA, f"reference values without files of {part}")
    if any(len(name) > 500 or not _NAMES[part].fullmatch(name) for name in value):
        raise FormatError(Code.SCHEMA, f"reference values with a file that is none of {part}")
    fields = Fields(value, f"reference values.files.{part}")
    return {name: fields.digest(name) for name in value}


def read_released(path: Path, *, signed_by: str) -> Released:
    """Return what a file says of a release.

    Args:
        path: the file.
        signed_by: the public key that has to have signed it, in hex.

    Raises:
        UsageError: `file-missing`, `too-large`; `usage`: not a key.
        VerificationError: it is damaged, not such a file, or not signed by that key.
    """
    if not re.fullmatch("[0-9a-f]{64}", signed_by):
        raise UsageError(
            Code.USAGE,
            "--signed-by is not 64 small hexadecimal digits",
            hint="it is the signing key of who made the release, from where they tell it, and not from beside the file",
        )
    data = read_bounded(path, max_bytes=MAX_RELEASED_BYTES, what="file of reference values")
    try:
        return Released.parse(data, signed_by=bytes.fromhex(signed_by))
    except FormatError as error:
        raise VerificationError(
            error.code,
            f"nothing in {path} is believed: {error.message}",
            hint="get file and key again from who made the release; a key that came with the file proves nothing",
        ) from None
