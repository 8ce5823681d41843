"""Public cases of TPMs: quotes as go-tpm-tools and tpm2-tools keep them, and a blob of ours.

By the roles of a case's files: `evidence`, `ak` and `ek` are a blob and the keys that its challenge request named, and
`bound` is composite and secret; `attestation` is go-tpm-tools' protobuf; `quote`, `signature`, `ak` and `values` are
what `tpm2_quote` writes; `certificates` and `issuer` are those of an endorsement key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.tpm.endorsement import check_endorsement, credential_for
from glasshouse.attestation.roots.tpm.tpm_evidence import appraise
from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.attestation.roots.tpm.tpm_quote import appraise_quote, attesting_key, check_ak
from glasshouse.wire.crypto import sha256
from tools.hardware_cases import HardwareCase

_SHA256 = 0x0B


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> object:
    """Appraise a case's files; raises `CheckFailedError`."""
    policy, bound = case.policy.tpm, case.bound or b""
    assert policy is not None, case.name
    if "evidence" in files:
        named = Bound(composite=bound[:32], secret=bound[32:], ak=files["ak"], ek=files["ek"])
        return appraise(files["evidence"], bound=named, now_us=case.now_us, collateral=pack, policy=case.policy)
    if "certificates" in files:
        chain = _der(files["certificates"]) + _der(files["issuer"])
        return check_endorsement(chain, policy=policy, now_us=case.now_us)
    if "attestation" in files:
        ak, quote, signature, values, log = _attestation(files["attestation"])
        registers = list(range(24))
    else:
        ak, quote, signature, log = files["ak"][2:], files["quote"], files["signature"], b""
        selected = int.from_bytes(quote[-37:-34], "little")
        registers = [register for register in range(24) if selected >> register & 1]
        listed = files["values"][140:]  # behind 16 selections of 8 bytes, and counts
        values = [listed[2 + at * 66 : 2 + at * 66 + 32] for at in range(len(registers))]
    assert check_ak(ak).hex() in policy.aks, case.name
    return appraise_quote(
        quote,
        signature,
        key=attesting_key(ak),
        values=values,
        log=log,
        accepted=policy.pcrs,
        extra_data=bound,
        registers=registers,
    )


def _der(data: bytes) -> bytes:
    load = x509.load_pem_x509_certificate if data.startswith(b"-") else x509.load_der_x509_certificate
    return load(data).public_bytes(Encoding.DER)


def _attestation(data: bytes) -> tuple[bytes, bytes, bytes, list[bytes], bytes]:
    """Return key, quote, signature, values and log of the bank sha256."""
    members = list(_fields(data))
    for number, member in members:
        if number == 2:
            quote = dict(_fields(member))
            registers = list(_fields(quote[3]))
            if registers[0] == (1, bytes([_SHA256])):
                found = dict(_register(one) for number, one in registers[1:])
                values = [found[register] for register in range(24)]
                return dict(members)[1], quote[1], quote[2], values, dict(members)[3]
    raise AssertionError("an attestation without the bank sha256")


def _register(data: bytes) -> tuple[int, bytes]:
    members = dict(_fields(data))
    return int.from_bytes(members.get(1, b""), "big"), members[2]


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of a protobuf message's fields; a number's content is one byte or more, big-endian."""
    at = 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 2:
            length = number()
            yield key >> 3, data[at : at + length]
            at += length
        else:
            assert key & 7 == 0
            value = number()
            yield key >> 3, value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def _keep(folder: Path) -> None:
    """Make the kept blob with a software TPM, and what its case needs."""
    from tools.software_tpm import IMAGE, software_tpm

    with software_tpm() as tpm:
        policy: TpmPolicy = tpm.policy(IMAGE)
        collector = tpm.collector()
        keys = collector.prepare()
        secret, composite = sha256(b"the secret of the kept case"), sha256(b"the composite of the kept case")
        credential = credential_for(keys.ak, keys.ek, secret, policy=policy, now_us=1_798_000_000_000_000)
        collector._log = b""  # what of a log's events is in no digest may be changed
        blob = collector.collect(bound=Bound(composite=composite), credential=credential)
        collector.close()
    for name, data in (("swtpm.json", blob), ("swtpm-ak.bin", keys.ak), ("swtpm-ek.der", keys.ek)):
        (folder / name).write_bytes(data)
    (folder / "swtpm-policy.json").write_text(
        json.dumps({"bound": (composite + secret).hex(), "policy": {"tpm": policy.to_json()}}, indent=1)
    )


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
