"""A device's report: an SPDM GET_MEASUREMENTS request, which carries the nonce, and its signed response.

Source: DMTF DSP0274 1.1, 10.11; NVIDIA's nvtrust for what is in the opaque data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from glasshouse.attestation.roots.nvidia.nvidia_blob import GpuMode
from glasshouse.errors import Code, FormatError

SIGNATURE_BYTES = 96
SWITCH_CHIP = "LS_10"
_REQUEST = bytes.fromhex("11e001ff")  # version 1.1, with a signature, all measurements
_RESPONSE = bytes.fromhex("11600000")
_DIGEST_BYTES = 48
_BLOCK = bytes.fromhex("013300")  # DMTF's form, 51 bytes
_MODES = {b"\0\0": GpuMode.SPT, b"\1\0": GpuMode.MPT, b"\2\0": GpuMode.PPCIE}
_DRIVER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_FIRMWARE = re.compile(r"[0-9A-F]{2}(\.[0-9A-F]{2}){4}")
_PART = re.compile(r"[A-Za-z0-9]{1,16}")
_PDI_BYTES = 8
_MAX_PDIS = 8


class _Field:
    """Types of opaque data."""

    DRIVER, VBIOS, CHIP_SKU, PROJECT, PROJECT_SKU, FWID, PPCIE = 3, 6, 15, 17, 18, 20, 21
    PDI, LOCKED, GPU_PDIS = 22, 25, 26  # of a GPU, PDI are the switches at its links
    CHIP, MODE = 35, 36


@dataclass(frozen=True, kw_only=True, slots=True)
class SpdmReport:
    """A report whose signature held."""

    nonce: bytes  # of the request
    blocks: Mapping[int, bytes]  # measurements by manifest's index: that of their block, less one
    opaque: Mapping[int, bytes]  # by type

    @classmethod
    def parse(cls, data: bytes) -> SpdmReport:
        """Parse the whole of a report; raises `FormatError`."""
        reader = _Reader(data)
        reader.want(_REQUEST)
        nonce = reader.take(32)
        reader.want(b"\x00")  # the slot of the certificates
        reader.want(_RESPONSE)
        count, record = reader.number(1), _Reader(reader.take(reader.number(3)))
        blocks = {}
        for index in range(1, count + 1):
            record.want(bytes([index]) + _BLOCK)
            if record.number(1) & 0x80:  # a raw measurement, which no manifest has
                raise FormatError(Code.SCHEMA, "a measurement that is no digest")
            record.want(_DIGEST_BYTES.to_bytes(2, "little"))
            blocks[index - 1] = record.take(_DIGEST_BYTES)
        record.end()
        reader.take(32)  # the device's own nonce
        fields, opaque = _Reader(reader.take(reader.number(2))), dict[int, bytes]()
        while fields.is_more:
            name = fields.number(2)
            if name in opaque:
                raise FormatError(Code.SCHEMA, f"opaque data of the type {name} twice")
            opaque[name] = fields.take(fields.number(2))
        reader.take(SIGNATURE_BYTES)
        reader.end()
        return cls(nonce=nonce, blocks=blocks, opaque=opaque)

    @property
    def fwid(self) -> bytes | None:
        """The digest of the firmware that has the report's key."""
        return self.opaque.get(_Field.FWID)

    @property
    def driver(self) -> str:
        """The version of a GPU's driver; raises `FormatError`."""
        return self._text(_Field.DRIVER, _DRIVER)

    def manifests(self, chip: str) -> tuple[tuple[str, str], ...]:
        """Return names and versions of the manifests of a device's driver and firmware; raises `FormatError`.

        Args:
            chip: as its certificate names it.
        """
        if chip == SWITCH_CHIP:
            bios = self._text(_Field.VBIOS, _FIRMWARE)
            return ((f"NV_SWITCH_BIOS_5612_0002_890_{bios.replace('.', '')}", bios),)
        if chip == "GH100":
            driver = f"NV_GPU_DRIVER_GH100_{self.driver}"
        else:
            driver = f"NV_GPU_CC_DRIVER_{self._text(_Field.CHIP, _PART)}_{self.driver}"
        value = self.opaque.get(_Field.VBIOS, b"")
        if len(value) != 8 or any(value[5:]):
            raise FormatError(Code.SCHEMA, "no version of a GPU's firmware")
        vbios = [f"{byte:02X}" for byte in (*reversed(value[:4]), value[4])]
        parts = [self._text(name, _PART).upper() for name in (_Field.PROJECT, _Field.PROJECT_SKU, _Field.CHIP_SKU)]
        return (driver, self.driver), ("_".join(("NV_GPU_VBIOS", *parts, "".join(vbios))), ".".join(vbios))

    def mode(self, is_switch: bool) -> GpuMode:
        """Return what protects a GPU; a switch is in the mode `ppcie` once it is locked; raises `FormatError`."""
        if is_switch:
            return GpuMode.PPCIE if self.opaque.get(_Field.LOCKED) == b"\1\0" else GpuMode.OFF
        behind_switches = {None: False, b"\x55": False, b"\xaa": True}.get(self.opaque.get(_Field.PPCIE))
        number = self.opaque.get(_Field.MODE)
        mode = _MODES.get(b"\2\0" if number is None and behind_switches else number or b"\0\0")
        if mode is None or behind_switches is not (mode is GpuMode.PPCIE):
            raise FormatError(Code.SCHEMA, "no mode of a GPU")
        return mode

    @property
    def pdi(self) -> bytes:
        """The number that is burnt into a switch; empty where it does not say."""
        return self.opaque.get(_Field.PDI, b"")

    def connected(self, is_switch: bool) -> frozenset[bytes]:
        """Return what a switch has at its ports, or a GPU at its links, by the numbers that are burnt into them.

        Raises:
            FormatError: where a list is of another form; without one it is empty.
        """
        value = self.opaque.get(_Field.GPU_PDIS if is_switch else _Field.PDI, b"")
        if is_switch:  # its ports follow
            value = value[: _MAX_PDIS * _PDI_BYTES]
        if len(value) % _PDI_BYTES:
            raise FormatError(Code.SCHEMA, "a list of another form of what a device is connected with")
        numbers = {value[at : at + _PDI_BYTES] for at in range(0, len(value), _PDI_BYTES)} - {bytes(_PDI_BYTES)}
        return frozenset(numbers if is_switch else (bytes(reversed(number)) for number in numbers))

    def _text(self, name: int, form: re.Pattern[str]) -> str:
        value = self.opaque.get(name, b"").rstrip(b"\0").decode("ascii", "replace")
        if not form.fullmatch(value):
            raise FormatError(Code.SCHEMA, f"opaque data of the type {name} in another form")
        return value


def is_signed(data: bytes, key: ec.EllipticCurvePublicKey) -> bool:
    """Return whether this key signed a report: request and response, without the signature itself."""
    signature = data[-SIGNATURE_BYTES:]
    half = SIGNATURE_BYTES // 2
    numbers = (int.from_bytes(part, "big") for part in (signature[:half], signature[half:]))
    try:
        key.verify(encode_dss_signature(*numbers), data[:-SIGNATURE_BYTES], ec.ECDSA(SHA384()))
    except InvalidSignature:
        return False
    return True


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._data):
            raise FormatError(Code.SCHEMA, "a report that is cut short")
        return self._data[self._at - length : self._at]

    def number(self, length: int) -> int:
        return int.from_bytes(self.take(length), "little")

    def want(self, data: bytes) -> None:
        if self.take(len(data)) != data:
            raise FormatError(Code.SCHEMA, f"not {data.hex()} where a report has it")

    @property
    def is_more(self) -> bool:
        return self._at < len(self._data)

    def end(self) -> None:
        if self.is_more:
            raise FormatError(Code.SCHEMA, "bytes behind a part of a report")
