"""A device's report: an SPDM GET_MEASUREMENTS request, which carries the nonce, and its signed response.

Source: DMTF DSP0274 1.1, 10.11; NVIDIA's nvtrust for what is in the opaque data.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from glasshouse.attestation.roots.nvidia.nvidia_blob import GpuMode
from glasshouse.attestation.roots.refusing import require
from glasshouse.errors import Code, FormatError

SWITCH_CHIP = "LS_10"
SIGNATURE_BYTES = 96
_REQUEST = bytes.fromhex("11e001ff")  # version 1.1, with a signature, all measurements
_RESPONSE = bytes.fromhex("0011600000")  # behind the nonce: the slot of the certificates; version, code, two parameters
_HEAD = struct.Struct("<4s32s5sB3s")  # request, nonce, response, how many blocks, their length
_FIELD = struct.Struct("<HH")  # type and length of opaque data
_BLOCK_BYTES, _NONCE_BYTES, _HALF = 55, 32, SIGNATURE_BYTES // 2
_BLOCK = re.compile(rb"(.)\x01\x33\x00[\x00-\x7f]\x30\x00(.{48})", re.DOTALL)  # DMTF's form, a digest of SHA-384
_DRIVER, _VBIOS, _CHIP_SKU, _PROJECT, _PROJECT_SKU, _FWID, _PPCIE = 3, 6, 15, 17, 18, 20, 21  # types of opaque data
_PDI, _LOCKED, _GPU_PDIS, _CHIP, _MODE = 22, 25, 26, 35, 36
_MODES = {b"\0\0": GpuMode.SPT, b"\1\0": GpuMode.MPT, b"\2\0": GpuMode.PPCIE}
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_FIRMWARE = re.compile(r"[0-9A-F]{2}(\.[0-9A-F]{2}){4}")
_PART = re.compile(r"[A-Za-z0-9]{1,16}")
_PDI_BYTES, _PORTS_AT = 8, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SpdmReport:
    """A report whose signature held."""

    nonce: bytes  # of the request
    blocks: Mapping[int, bytes]  # measurements by manifest's index: that of their block, less one
    opaque: Mapping[int, bytes]  # by type

    @classmethod
    def parse(cls, data: bytes) -> SpdmReport:
        """Parse the whole of a report; raises `FormatError`."""
        require(len(data) > _HEAD.size, "a request or response that is cut short")
        request, nonce, response, count, record_bytes = _HEAD.unpack_from(data)
        size = count * _BLOCK_BYTES
        is_formed = (request, response, record_bytes) == (_REQUEST, _RESPONSE, size.to_bytes(3, "little"))
        require(is_formed, "a request or response of another form")
        record_end = _HEAD.size + size
        opaque_at = record_end + _NONCE_BYTES + 2
        end = opaque_at + int.from_bytes(data[opaque_at - 2 : opaque_at], "little")
        require(len(data) == end + SIGNATURE_BYTES, "a report of another length than it says")
        found = [_BLOCK.fullmatch(data, at, at + _BLOCK_BYTES) for at in range(_HEAD.size, record_end, _BLOCK_BYTES)]
        blocks = {each[1][0] - 1: each[2] for each in found if each}
        require([*blocks] == [*range(count)], "measurements of another form or order")
        opaque = dict[int, bytes]()
        while opaque_at < end:
            name, size = _FIELD.unpack_from(data, opaque_at)
            value_at, opaque_at = opaque_at + _FIELD.size, opaque_at + _FIELD.size + size
            require(name not in opaque and opaque_at <= end, f"opaque data of the type {name} twice, or cut short")
            opaque[name] = data[value_at:opaque_at]
        return cls(nonce=nonce, blocks=blocks, opaque=opaque)

    @property
    def fwid(self) -> bytes:
        """The digest of the firmware that has the report's key; empty where it does not say."""
        return self.opaque.get(_FWID, b"")

    @property
    def driver(self) -> str:
        """The version of a GPU's driver; raises `FormatError`."""
        return self._text(_DRIVER, _VERSION)

    @property
    def pdi(self) -> bytes:
        """The number that is burnt into a switch; empty where it does not say."""
        return self.opaque.get(_PDI, b"")

    def manifests(self, chip: str) -> dict[str, tuple[str, str, str]]:
        """Return the manifests of a device's driver and firmware by name, and what each has to say that it is of.

        Args:
            chip: as its certificate names it.

        Raises:
            FormatError: where the report does not name them.
        """
        if chip == SWITCH_CHIP:
            bios = self._text(_VBIOS, _FIRMWARE)
            return {f"NV_SWITCH_BIOS_5612_0002_890_{bios.replace('.', '')}": ("SWITCH", "LS10", bios)}
        made = "DRIVER_GH100" if chip == "GH100" else f"CC_DRIVER_{self._text(_CHIP, _PART)}"
        value = self.opaque.get(_VBIOS, b"")
        require(len(value) == 8 and not any(value[5:]), "no version of a GPU's firmware")
        vbios = [f"{byte:02X}" for byte in (*reversed(value[:4]), value[4])]
        parts = [self._text(name, _PART).upper() for name in (_PROJECT, _PROJECT_SKU, _CHIP_SKU)]
        firmware = "_".join(("NV_GPU_VBIOS", *parts, "".join(vbios)))
        return {
            f"NV_GPU_{made}_{self.driver}": ("GPU", chip, self.driver),
            firmware: ("GPU", chip, ".".join(vbios)),
        }

    def mode(self, is_switch: bool) -> GpuMode:
        """Return what protects a GPU; a switch is in the mode `ppcie` once it is locked; raises `FormatError`."""
        if is_switch:
            return GpuMode.PPCIE if self.opaque.get(_LOCKED) == b"\1\0" else GpuMode.OFF
        behind_switches = {None: False, b"\x55": False, b"\xaa": True}.get(self.opaque.get(_PPCIE))
        mode = _MODES.get(self.opaque.get(_MODE, b"\2\0" if behind_switches else b"\0\0"))
        if mode is None or behind_switches is not (mode is GpuMode.PPCIE):
            raise FormatError(Code.SCHEMA, "no mode of a GPU")
        return mode

    def connected(self, is_switch: bool) -> frozenset[bytes]:
        """Return what a switch has at its ports, or a GPU at its links, by the numbers that are burnt into them.

        Raises:
            FormatError: where a list is of another form; without one it is empty.
        """
        value = self.opaque.get(_GPU_PDIS, b"")[:_PORTS_AT] if is_switch else self.opaque.get(_PDI, b"")[::-1]
        require(not len(value) % _PDI_BYTES, "a list of another form of what a device is connected with")
        numbers = {value[at : at + _PDI_BYTES] for at in range(0, len(value), _PDI_BYTES)}
        return frozenset(numbers - {bytes(_PDI_BYTES)})

    def _text(self, name: int, form: re.Pattern[str]) -> str:
        value = self.opaque.get(name, b"").rstrip(b"\0").decode("ascii", "replace")
        require(form.fullmatch(value) is not None, f"opaque data of the type {name} in another form")
        return value


def is_signed(data: bytes, key: ec.EllipticCurvePublicKey, signature: bytes) -> bool:
    """Return whether this key signed data with SHA-384; the signature is both numbers, 48 bytes each."""
    numbers = (int.from_bytes(part, "big") for part in (signature[:_HALF], signature[_HALF:]))
    try:
        key.verify(encode_dss_signature(*numbers), data, ec.ECDSA(SHA384()))
    except InvalidSignature:
        return False
    return len(signature) == SIGNATURE_BYTES
