"""Signs a run's outputs in the OpenSSF Model Signing form, for tools other than Glasshouse (ADR 0022).

Those tools take no Ed25519 key, so the owner has a second key, ECDSA on P-256: made on the first export, kept sealed
to the owner's sealing key, certified by a statement that the owner signs. Law: nothing of ours accepts its signature.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.evidence.receipt import RECEIPT_TYPE, STATEMENT_TYPE
from glasshouse.jobs.owner.home import Home, is_there, read_bounded, write_private
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.results.collect import RunOutput
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import HPKE_OVERHEAD_BYTES, hpke_seal, lengths_prefixed
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.record import Record, octets

CERTIFICATE_TYPE = "application/vnd.glasshouse.model-signing-key+json"
SIGNATURE_NAME = "model.sig"
_CERTIFIES: Mapping[str, Json] = {
    "algorithm": "ecdsa-p256-sha256",
    "kind": "https://glasshouse.dev/model-signing-key/v1",
}
_STORED_KIND = "glasshouse-model-signing-key"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_MAX_BYTES = 16384
_SCALAR_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Certificate(Record, name="certificate", max_bytes=_MAX_BYTES, constants=_CERTIFIES):
    created_us: int
    public: Annotated[bytes, octets(max_length=256)]  # SubjectPublicKeyInfo, DER


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored(Record, name="model signing key", max_bytes=_MAX_BYTES, constants={"kind": _STORED_KIND, "version": 1}):
    certificate: Envelope
    sealed: Annotated[bytes, octets(_SCALAR_BYTES + HPKE_OVERHEAD_BYTES)]


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The owner's key for exported model signatures."""

    private: ec.EllipticCurvePrivateKey  # on P-256
    certificate: Envelope  # the owner's statement that it is theirs

    @property
    def pem(self) -> bytes:
        """The public key as `model_signing` takes it."""
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def model_key(home: Home, identity: Identity, *, now_us: int) -> ModelKey:
    """Return the owner's key for model signatures, made by the first call; raises `UsageError` for a damaged one."""
    if not is_there(home.model_signing):
        _make(home, identity, now_us)
    try:
        data = read_bounded(home.model_signing, max_bytes=_MAX_BYTES, what="model signing key", private=True)
        stored = _Stored.parse(data.removesuffix(b"\n"))
        scalar = identity.sealing.open(stored.sealed, info=_info(identity))
        private = ec.derive_private_key(int.from_bytes(scalar), ec.SECP256R1())
        if certified_key(stored.certificate, owner=identity.signing.public) != _spki(private):
            raise FormatError(Code.SCHEMA, "its certificate is of another key")
    except (FormatError, ValueError) as error:
        why = f"the key of model signatures {home.model_signing} is not usable: {error}"
        raise UsageError(Code.IDENTITY, why) from None
    return ModelKey(private, stored.certificate)


def certified_key(certificate: Envelope, *, owner: bytes) -> bytes:
    """Return the public key (SubjectPublicKeyInfo, DER) that an owner's statement certifies; raises `FormatError`."""
    return _Certificate.parse(certificate.verify(CERTIFICATE_TYPE, owner)).public


def sign_model(key: ModelKey, outputs: Sequence[RunOutput], *, name: str, bundle_sha256: bytes) -> bytes:
    """Return the bundle that `model_signing verify` takes for a run's outputs; raises `UsageError` if it has none."""
    if not outputs:
        raise UsageError(Code.USAGE, "the run has no outputs: there is no model to sign")
    files = sorted((one.name, one.sha256) for one in outputs)
    resources: list[Json] = [{"algorithm": "sha256", "digest": digest.hex(), "name": path} for path, digest in files]
    root = hashlib.sha256(b"".join(digest for _, digest in files)).hexdigest()
    serialization: Json = {
        "allow_symlinks": False,
        "hash_type": "sha256",
        "ignore_paths": [SIGNATURE_NAME],
        "method": "files",
    }
    # Readers of this predicate pass over unknown members: the run behind it, and the key's owner.
    ours: Json = {"certificate": key.certificate.to_json(), "receipt_bundle_sha256": bundle_sha256.hex()}
    statement = encode(
        {
            "_type": STATEMENT_TYPE,
            "predicate": {
                "glasshouse": ours,
                "resources": resources,
                "serialization": serialization,
            },
            "predicateType": _PREDICATE_TYPE,
            "subject": [{"digest": {"sha256": root}, "name": name}],
        }
    )
    signature = key.private.sign(dsse.pae(RECEIPT_TYPE, statement), ec.ECDSA(hashes.SHA256()))
    envelope: Json = {
        "payload": base64.b64encode(statement).decode(),
        "payloadType": RECEIPT_TYPE,
        "signatures": [{"keyid": "", "sig": base64.b64encode(signature).decode()}],
    }
    hint = hashlib.sha256(key.pem).hexdigest()
    return encode(
        {
            "dsseEnvelope": envelope,
            "mediaType": _BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        }
    )


def _make(home: Home, identity: Identity, now_us: int) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    payload = _Certificate(created_us=now_us, public=_spki(private)).encode()
    certificate = dsse.sign(CERTIFICATE_TYPE, payload, [identity.signing])
    scalar = private.private_numbers().private_value.to_bytes(_SCALAR_BYTES)
    sealed = hpke_seal(scalar, recipient=identity.sealing.public, info=_info(identity))
    write_private(home.model_signing, _Stored(certificate=certificate, sealed=sealed).encode() + b"\n", replace=False)


def _spki(private: ec.EllipticCurvePrivateKey) -> bytes:
    return private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _info(identity: Identity) -> bytes:
    return lengths_prefixed(b"glasshouse model signing key v1", identity.signing.public)
