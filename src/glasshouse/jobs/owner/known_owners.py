"""The known owners of a home, and where the key of a verification came from.

Law: a key counts as known only if it is the home's own, was added to its known owners, or has the fingerprint that was
asked for. Any other key may be the forger's own, and `OwnerTrust` has a warning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, GlasshouseError, UsageError, VerificationError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.jobs.owner.home import Home, is_file, open_regular, private_folder, write_private
from glasshouse.jobs.owner.owner_identity import OwnerPublic, read_public
from glasshouse.package.layout import MAGIC
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Package
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.statements import LINE_START, MAX_LINE_BYTES

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SUFFIX = ".pub"
_FINGERPRINT_CHARS = 40
_PACKAGE = MAGIC[:4]  # also of one whose magic a transfer damaged


class Anchor(StrEnum):
    """Where the key came from that something was verified with."""

    YOURS = "yours"
    KNOWN = "known"
    FINGERPRINT = "fingerprint"
    FILE = "file"
    CAME_ALONG = "came-along"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerTrust:
    """An owner's key, and where it came from."""

    owner: OwnerPublic  # the key
    anchor: Anchor  # where it came from
    name: str = ""  # what a known owner is called here

    @property
    def known(self) -> bool:
        """Whether more stands behind the key than the file that it was read from."""
        return self.anchor in (Anchor.YOURS, Anchor.KNOWN, Anchor.FINGERPRINT)

    @property
    def warning(self) -> str:
        """What stands beside a verdict under this key; empty for a known owner."""
        if self.known:
            return ""
        came = "came with what it should prove" if self.anchor is Anchor.CAME_ALONG else "is of an owner not known here"
        return (
            f"THE OWNER IS NOT KNOWN: the key {came}, and a forger brings a key too. Compare its fingerprint with one "
            "that you have from the owner; then verify with --fingerprint, or keep the key: glasshouse owners add. "
            f"It is {self.owner.fingerprint}"
        )

    def to_json(self) -> dict[str, Json]:
        """Return where the key came from, as an object."""
        return {"anchor": self.anchor.value, "known": self.known, "name": self.name or None}


def known_owners(home: Home) -> dict[str, OwnerPublic]:
    """Return the owners that were added to a home, by name; raises `UsageError` for a damaged file."""
    if not home.owners.is_dir():
        return {}
    paths = sorted(path for path in home.owners.iterdir() if path.suffix == _SUFFIX)
    return {path.stem: read_public(path) for path in paths}


def add_owner(home: Home, name: str, owner: OwnerPublic, *, replace: bool = False) -> None:
    """Keep an owner's key under a name; raises `UsageError` for a name or a key that is taken, or no name."""
    if not _NAME.fullmatch(name):
        form = "small letters, digits, '.', '_' and '-', at most 64"
        raise UsageError(Code.USAGE, f"{name[:64]!r} is not a name: {form}")
    other = [kept for kept, public in known_owners(home).items() if public == owner and kept != name]
    if other:
        raise UsageError(Code.USAGE, f"this owner is known already, as {other[0]}")
    write_private(private_folder(home.owners) / f"{name}{_SUFFIX}", owner.encode(), replace=replace)


def remove_owner(home: Home, name: str) -> tuple[str, OwnerPublic]:
    """Forget the owner with this name or fingerprint and return it; raises `UsageError`: `identity`."""
    for kept, owner in known_owners(home).items():
        if name == kept or same_fingerprint(owner, name):
            (home.owners / f"{kept}{_SUFFIX}").unlink()
            return kept, owner
    raise UsageError(Code.IDENTITY, f"no known owner {name[:80]!r}", hint="see: glasshouse owners list")


def recognise(home: Home, owner: OwnerPublic) -> OwnerTrust:
    """Look up a key that came with a document among a home's own and known ones."""
    found = (trust for trust in _at_hand(home) if trust.owner == owner)
    return next(found, OwnerTrust(owner=owner, anchor=Anchor.CAME_ALONG))


def _at_hand(home: Home) -> list[OwnerTrust]:
    own = [OwnerTrust(owner=read_public(home.owner_public), anchor=Anchor.YOURS)] if is_file(home.owner_public) else []
    return own + [OwnerTrust(owner=one, anchor=Anchor.KNOWN, name=name) for name, one in known_owners(home).items()]


def trusted_owner(
    home: Home, document: Path, *, named: str | None = None, fingerprint: str | None = None
) -> OwnerTrust:
    """Decide with whose key a document is verified; `named` is a known owner's name or fingerprint, or a path.

    Raises:
        UsageError: `identity` where no key is at hand, `file-missing`; `usage` for text that is no fingerprint.
        VerificationError: `owner-mismatch` for a key with another fingerprint.
    """
    if fingerprint is not None and len(_digits(fingerprint)) != _FINGERPRINT_CHARS:
        raise UsageError(Code.USAGE, f"a fingerprint has {_FINGERPRINT_CHARS} hexadecimal digits; compare all of them")
    found = _named(home, named, document) if named is not None else _by_signature(home, document, fingerprint)
    if fingerprint is None or (found.known and same_fingerprint(found.owner, fingerprint)):
        return found
    if not same_fingerprint(found.owner, fingerprint):
        why = f"the owner's key has another fingerprint than was asked for: {found.owner.fingerprint}"
        raise VerificationError(Code.OWNER_UNKNOWN, why)
    return OwnerTrust(owner=found.owner, anchor=Anchor.FINGERPRINT)


def _named(home: Home, named: str, document: Path) -> OwnerTrust:
    # A known owner goes before a file of that name: the working folder may be a stranger's.
    for trust in _at_hand(home):
        if trust.anchor is Anchor.KNOWN and (named == trust.name or same_fingerprint(trust.owner, named)):
            return trust
    path = Path(named)
    found = recognise(home, read_public(path))
    if found.known:
        return found
    return OwnerTrust(owner=found.owner, anchor=Anchor.CAME_ALONG if _beside(path, document) else Anchor.FILE)


def _beside(path: Path, document: Path) -> bool:
    try:
        folder = document.resolve() if document.is_dir() else document.resolve().parent
        return path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):  # a link that leads to itself
        return False


def _by_signature(home: Home, document: Path, fingerprint: str | None) -> OwnerTrust:
    """Choose among the keys at hand the one that signed a document; the home's own where none did."""
    signers, brought = _claimed(document)
    at_hand = _at_hand(home)
    for trust in at_hand:
        if key_id(trust.owner.signing) in signers:
            return trust
    if fingerprint is not None and brought is not None:
        return OwnerTrust(owner=brought, anchor=Anchor.CAME_ALONG)
    if at_hand and at_hand[0].anchor is Anchor.YOURS:
        return at_hand[0]
    raise UsageError(
        Code.IDENTITY,
        "no key of this owner is known here",
        hint="add it once: glasshouse owners add FILE, or name it: --owner owner.pub",
    )


def _claimed(document: Path) -> tuple[set[str], OwnerPublic | None]:
    """Return the key ids that a document claims, and the owner's key if it brings one: all of it **unverified**."""
    if document.suffix == ".log":  # what vouches for a log lies beside it
        document = document.with_name("receipt.json")
    try:
        with open_regular(document) as stream:
            start = stream.read(len(_PACKAGE))
            stream.seek(0)
            if start == _PACKAGE:
                owner = _owner_of(Package.open(stream).manifest)
                return {key_id(owner.signing)}, owner
            data = stream.read(MAX_BUNDLE_BYTES + 1)
            if data.startswith(LINE_START):
                data = _first_bundle(data + stream.read(MAX_LINE_BYTES))
        if data.startswith(b'{"payload":'):
            envelope = Envelope.parse(data, max_bytes=MAX_BUNDLE_BYTES)
            return {name for name, _ in envelope.signatures}, None
        bundle = Bundle.parse(data)
        manifest = None if bundle.manifest is None else Manifest.parse(bundle.manifest.payload)
        return {name for name, _ in bundle.delegation.signatures}, None if manifest is None else _owner_of(manifest)
    except (OSError, GlasshouseError):
        return set(), None


def _first_bundle(line: bytes) -> bytes:
    """Return the first receipt bundle of a line file; nothing where it has none."""
    whole: Any = decode(line, max_bytes=MAX_LINE_BYTES)
    legs = whole.get("legs") if isinstance(whole, dict) else None
    for leg in legs if isinstance(legs, list) else ():
        if isinstance(leg, dict) and leg.get("bundles"):
            data: bytes = encode(leg["bundles"][0])
            return data
    return b""


def _owner_of(manifest: Manifest) -> OwnerPublic:
    return OwnerPublic(signing=manifest.owner_signing, sealing=manifest.owner_sealing)


def _digits(fingerprint: str) -> str:
    text = fingerprint.replace("-", "").replace(":", "").replace(" ", "").lower()
    return text if re.fullmatch("[0-9a-f]*", text) else ""


def same_fingerprint(owner: OwnerPublic, text: str) -> bool:
    """Return whether a text is the whole of an owner's fingerprint, with or without its dashes."""
    return _digits(owner.fingerprint) == _digits(text)
