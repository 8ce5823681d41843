"""An attestation report of SEV-SNP, version 3 to 5, in its one form.

Source: AMD, SEV Secure Nested Paging Firmware ABI Specification (56860), ATTESTATION_REPORT; numbers are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from glasshouse.attestation.roots.sev_snp.sev_snp_blob import REPORT_BYTES
from glasshouse.errors import Code, FormatError

VERSIONS = range(3, 6)
_SIGNED_BYTES = 0x2A0
_ECDSA_P384_SHA384 = 1
_POLICY_BITS, _POLICY_ONE = 26, 17
_PLATFORM_BITS = 0b1011_1111
# Where nothing may be.
_ZERO = ((0x4C, 0x50), (0x18B, 0x1A0), (0x1EB, 0x1EC), (0x1EF, 0x1F0), (0x208, 0x2A0), (0x330, REPORT_BYTES))
_ZERO_BELOW_5 = (0x1F8, 0x208)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnpReport:
    """A report; `parse` checks no signature."""

    data: bytes
    version: int
    guest_svn: int
    guest_policy: int  # bits that the guest was launched with
    vmpl: int
    current_tcb: bytes  # 8 bytes each, whose meaning is the product's
    reported_tcb: bytes
    committed_tcb: bytes
    launch_tcb: bytes
    platform: int  # bits
    has_author_key: bool
    is_vlek: bool  # signed by the key of a cloud's, not of the chip's
    report_data: bytes  # 64 bytes
    measurement: bytes  # 48 bytes
    host_data: bytes  # 32 bytes
    id_key: bytes  # SHA-384 of the key that signed the ID block; zero without one
    author_key: bytes  # of the key that signed that key
    family: int  # of the processor, as CPUID gives it
    model: int
    chip: bytes  # 64 bytes; zero where the host masks it
    committed: tuple[int, int, int]  # version of the firmware that cannot be gone back behind
    mitigations: int  # bits that held at launch, and do now

    @classmethod
    def parse(cls, data: bytes) -> SnpReport:
        """Read a report; raises `FormatError`."""
        if len(data) != REPORT_BYTES:
            raise FormatError(Code.SCHEMA, f"a report of another length than {REPORT_BYTES} bytes")

        def number(at: int, length: int = 4) -> int:
            return int.from_bytes(data[at : at + length], "little")

        version, policy, platform, signer = number(0), number(0x08, 8), number(0x40, 8), number(0x48)
        if version not in VERSIONS:
            # One of version 2 does not name the processor, nor whether memory was searched for aliases (BadRAM).
            raise FormatError(Code.SCHEMA, f"a report of version {version}: 3 to 5 are accepted")
        for low, high in (*_ZERO, *([_ZERO_BELOW_5] if version < 5 else [])):
            if any(data[low:high]):
                raise FormatError(Code.SCHEMA, f"bytes {low:#x} to {high:#x} of a report that are not zero")
        if policy >> _POLICY_BITS or not policy >> _POLICY_ONE & 1 or platform & ~_PLATFORM_BITS or signer >> 5:
            raise FormatError(Code.SCHEMA, "reserved bits of policy, platform or signer that are not what they must be")
        if number(0x34) != _ECDSA_P384_SHA384:
            raise FormatError(Code.SCHEMA, "a signature of another algorithm than ECDSA P-384 with SHA-384")
        if signer >> 2 & 7 not in (0, 1) or signer & 2:
            raise FormatError(Code.SCHEMA, "a report that no key signed")
        return cls(
            data=data,
            version=version,
            guest_svn=number(0x04),
            guest_policy=policy,
            vmpl=number(0x30),
            current_tcb=data[0x38:0x40],
            reported_tcb=data[0x180:0x188],
            committed_tcb=data[0x1E0:0x1E8],
            launch_tcb=data[0x1F0:0x1F8],
            platform=platform,
            has_author_key=bool(signer & 1),
            is_vlek=bool(signer >> 2 & 7),
            report_data=data[0x50:0x90],
            measurement=data[0x90:0xC0],
            host_data=data[0xC0:0xE0],
            id_key=data[0xE0:0x110],
            author_key=data[0x110:0x140],
            family=data[0x188],
            model=data[0x189],
            chip=data[0x1A0:0x1E0],
            committed=(data[0x1EE], data[0x1ED], data[0x1EC]),
            mitigations=number(0x1F8, 8) & number(0x200, 8),
        )

    def check_signature(self, key: ec.EllipticCurvePublicKey) -> None:
        """The key signed it; raises `InvalidSignature`."""
        r, s = (self.data[at : at + 72] for at in (_SIGNED_BYTES, _SIGNED_BYTES + 72))
        if any(r[48:] + s[48:]):  # numbers of the curve have 48 bytes: nothing may hide behind them
            raise InvalidSignature
        numbers = int.from_bytes(r, "little"), int.from_bytes(s, "little")
        key.verify(encode_dss_signature(*numbers), self.data[:_SIGNED_BYTES], ec.ECDSA(SHA384()))
