"""An attestation report of SEV-SNP, version 3 to 5, in its one form.

Source: AMD, SEV Secure Nested Paging Firmware ABI Specification (56860), ATTESTATION_REPORT.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from glasshouse.attestation.roots.refusing import require
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import REPORT_BYTES

_SIGNED_BYTES = 0x2A0
# Where nothing may be; the last two are mitigations, which version 5 has.
_ZERO = ((0x4C, 0x50), (0x18B, 0x1A0), (0x1EB, 0x1EC), (0x1EF, 0x1F0), (0x208, 0x2A0), (0x330, REPORT_BYTES))
_ZERO_BELOW_5 = (0x1F8, 0x208)
_POLICY_BITS, _POLICY_ONE, _PLATFORM_BITS, _ECDSA_P384, _VLEK = 26, 1 << 17, 0b1011_1111, 1, 1 << 2


@dataclass(frozen=True, slots=True)
class SnpReport:
    """A report, of which `parse` checks no signature; each of its numbers is little-endian."""

    data: bytes

    @classmethod
    def parse(cls, data: bytes) -> SnpReport:
        """Check the form of a report; raises `FormatError`."""
        found = cls(data)
        version, policy, signer = found.number(0), found.guest_policy, found.number(0x48)
        # One of version 2 does not name the processor, nor whether memory was searched for aliases (BadRAM).
        is_known = len(data) == REPORT_BYTES and 3 <= version <= 5
        require(is_known, f"a report of version {version}: 3 to 5 are accepted")
        for low, high in _ZERO if version == 5 else (*_ZERO, _ZERO_BELOW_5):
            require(not any(data[low:high]), f"bytes {low:#x} to {high:#x} of a report that are not zero")
        is_formed = not policy >> _POLICY_BITS and policy & _POLICY_ONE and not found.platform & ~_PLATFORM_BITS
        require(bool(is_formed), "reserved bits of policy or platform that are not what they must be")
        # SIGNING_KEY is VCEK or VLEK, MASK_CHIP_KEY is 0, and AUTHOR_KEY_EN is as it is.
        is_signed = found.number(0x34) == _ECDSA_P384 and signer & ~1 in (0, _VLEK)
        require(is_signed, "a report that no key signed, or by another algorithm than ECDSA P-384")
        return found

    def number(self, at: int, length: int = 4) -> int:
        """Return the number that stands there."""
        return int.from_bytes(self.data[at : at + length], "little")

    def check_signature(self, key: ec.EllipticCurvePublicKey) -> None:
        """The key signed it; raises `InvalidSignature`."""
        r, s = (self.data[at : at + 72] for at in (_SIGNED_BYTES, _SIGNED_BYTES + 72))
        if any(r[48:] + s[48:]):  # numbers of the curve have 48 bytes: nothing may hide behind them
            raise InvalidSignature
        numbers = int.from_bytes(r, "little"), int.from_bytes(s, "little")
        key.verify(encode_dss_signature(*numbers), self.data[:_SIGNED_BYTES], ec.ECDSA(SHA384()))

    guest_svn = property(lambda self: self.number(0x04))
    guest_policy = property(lambda self: self.number(0x08, 8))  # bits that the guest was launched with
    vmpl = property(lambda self: self.number(0x30))
    platform = property(lambda self: self.number(0x40, 8))  # bits
    has_author_key = property(lambda self: bool(self.data[0x48] & 1))
    is_vlek = property(lambda self: bool(self.data[0x48] >> 2))  # signed by the key of a cloud's, not of the chip's
    report_data = property(lambda self: self.data[0x50:0x90])
    measurement = property(lambda self: self.data[0x90:0xC0])
    host_data = property(lambda self: self.data[0xC0:0xE0])
    id_key = property(lambda self: self.data[0xE0:0x110])  # SHA-384 of what signed the ID block; zero without one
    author_key = property(lambda self: self.data[0x110:0x140])  # of the key that signed that key
    processor = property(lambda self: (self.data[0x188], self.data[0x189]))  # family and model, as CPUID has them
    chip = property(lambda self: self.data[0x1A0:0x1E0])  # zero where the host masks it
    committed = property(lambda self: (self.data[0x1EE], self.data[0x1ED], self.data[0x1EC]))  # version of the firmware
    mitigations = property(lambda self: self.number(0x1F8, 8) & self.number(0x200, 8))  # that held at launch and do now

    @property
    def tcbs(self) -> dict[str, bytes]:
        """Security versions, 8 bytes each, whose meaning is the product's.

        The key is made of the reported ones; the host cannot go back behind the committed ones, and those at launch
        measured the guest.
        """
        places = {"reported": 0x180, "committed": 0x1E0, "current": 0x38, "launch": 0x1F0}
        return {name: self.data[at : at + 8] for name, at in places.items()}
