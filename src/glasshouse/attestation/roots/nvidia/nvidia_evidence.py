"""The kind `nvidia`: each GPU of the job, and each switch between them, is genuine, in its right state and of this run.

Source: spec/hardware-evidence.md, section 7.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cryptography import x509

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import CHAINED_VECTOR, Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.nvidia.nvidia_blob import DeviceReport, GpuMode, NvidiaBlob
from glasshouse.attestation.roots.nvidia.nvidia_certificates import (
    certificate_of,
    check_chain,
    check_not_revoked,
    key_of,
)
from glasshouse.attestation.roots.nvidia.nvidia_policy import NvidiaPolicy
from glasshouse.attestation.roots.nvidia.nvidia_roots import PINNED, NvidiaRoots
from glasshouse.attestation.roots.nvidia.reference_manifest import ReferenceManifest, manifest_of
from glasshouse.attestation.roots.nvidia.spdm_report import SWITCH_CHIP, SpdmReport, is_signed
from glasshouse.errors import Code, FormatError

_FWID_OIDS = ("2.23.133.5.4.1", "2.23.133.5.4.1.1")  # of Hopper and switches, of Blackwell
_FWID = re.compile(bytes.fromhex("303d0609608648016503040202") + rb"\x04\x30(.{48})", re.DOTALL)  # of SHA-384
_SERIAL = re.compile(r"[0-9A-F]{2}([0-9A-F]{16})")  # a device's; most of it is the number that is burnt into it
_CHIP = re.compile(rf"(GH100|GB[12][0-9]{{2}}|{SWITCH_CHIP}) .*")

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """By what, and when, evidence is appraised."""

    now_us: int
    collateral: Pack
    policy: HardwarePolicy
    roots: NvidiaRoots

    @property
    def terms(self) -> NvidiaPolicy:
        """The policy's object of this kind, which names it."""
        if self.policy.nvidia is None:
            raise _refusal(Code.CHAIN_MISSING, "the policy names no nvidia")
        return self.policy.nvidia

    def not_revoked(self, chain: Sequence[bytes], root: bytes, first: int) -> int:
        """Ask about a chain from a place on; return when the first answer ends."""
        return check_not_revoked(
            chain,
            root,
            range(first, len(chain)),
            pack=self.collateral,
            now_us=self.now_us,
            max_age_s=self.policy.collateral.ocsp,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU or switch whose certificates and signature held."""

    place: str  # for people
    chip: str
    pdi: bytes  # the number that is burnt into it, by its certificate
    report: SpdmReport
    manifests: tuple[tuple[str, str], ...]  # names and versions of its driver and firmware
    mode: GpuMode
    connected: frozenset[bytes]  # in the mode `ppcie`, by their numbers
    not_after_us: int


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the evidence by NVIDIA's own roots; see `root_table.Appraise`."""
    return appraise_by(blob, bound, Judging(now_us=now_us, collateral=collateral, policy=policy, roots=PINNED))


def appraise_by(blob: bytes, bound: Bound, judging: Judging) -> Appraised:
    """Appraise the evidence by other roots; raises `CheckFailedError`, in the order of the specification."""
    evidence = read_blob(blob, bound, judging.terms)
    devices = check_devices(evidence, bound, judging)
    until_us = check_manifests(devices, judging)
    gpus, switches = devices[: len(evidence.gpus)], devices[len(evidence.gpus) :]
    if evidence.mode is GpuMode.PPCIE:
        check_topology(gpus, switches)
    check_bound(devices, bound)
    return Appraised(
        vector={**CHAINED_VECTOR, "hardware": 2, **({"instance-identity": 2} if judging.terms.device_ocsp else {})},
        not_after_us=min(until_us, *(device.not_after_us for device in devices)),
        claims={
            "gpus": [gpu.pdi.hex() for gpu in gpus],
            "manifests": sorted({name for device in devices for name, _ in device.manifests}),
            "mode": str(evidence.mode),
            "switches": [switch.pdi.hex() for switch in switches],
        },
    )


def read_blob(blob: bytes, bound: Bound, terms: NvidiaPolicy) -> NvidiaBlob:
    """Checks 1 to 3: the blob's form, how many devices it has, and the mode of the driver."""
    evidence = _formed(Code.HARDWARE_MALFORMED, "the blob nvidia", lambda: NvidiaBlob.parse(blob))
    wanted = (terms.gpus, terms.gpus, terms.switches)
    found = (len(evidence.gpus), len(bound.gpus), len(evidence.switches))
    if wanted != found:
        counts = ("{} GPUs, {} of them in the claims, {} switches".format(*each) for each in (wanted, found))
        raise _refusal(Code.GPU_COUNT, "evidence of another number of devices", *counts)
    if evidence.devtools:
        raise _refusal(Code.HARDWARE_DEBUG, "the driver is in the mode for developer tools, which protects nothing")
    if evidence.mode is GpuMode.OFF or (evidence.mode is GpuMode.PPCIE) != bool(terms.switches):
        modes = "ppcie" if terms.switches else "spt or mpt"
        raise _refusal(Code.GPU_MODE, "the driver protects the GPUs in another mode", modes, evidence.mode)
    return evidence


def check_devices(evidence: NvidiaBlob, bound: Bound, judging: Judging) -> list[Device]:
    """Checks 4 to 9, of each GPU and then of each switch; each is there once."""
    devices: list[Device] = []
    seen: set[bytes] = set()
    for number, each in enumerate((*evidence.gpus, *evidence.switches)):
        is_switch = number >= len(evidence.gpus)
        place = f"switch {number - len(evidence.gpus)}" if is_switch else f"GPU {number}"
        device = _device(each, place, [evidence.certificates[one] for one in each.chain], is_switch, judging)
        if device.pdi in seen:
            raise _refusal(Code.GPU_COUNT, f"{place} is there twice", "each once", device.pdi.hex())
        seen.add(device.pdi)
        if device.mode is not evidence.mode:
            message = f"{place} is in another mode than the driver says"
            raise _refusal(Code.GPU_MODE, message, evidence.mode, device.mode)
        if not is_switch and any(claimed.driver != device.report.driver for claimed in bound.gpus):
            raise _refusal(Code.GPU_IDENTITY, f"{place} has another driver than the claims say")
        devices.append(device)
    return devices


def check_manifests(devices: Sequence[Device], judging: Judging) -> int:
    """Check 10: each measurement is one of the manifests of its driver and firmware; return when these end."""
    ends = []
    kept: dict[tuple[tuple[str, str], ...], dict[int, frozenset[bytes]]] = {}
    for device in devices:
        if device.manifests not in kept:
            right: dict[int, frozenset[bytes]] = {}
            for name, version in device.manifests:
                manifest, until_us = _manifest(name, version, judging)
                if right.keys() & manifest.active.keys():
                    raise _refusal(Code.GPU_MANIFEST, f"{device.place}: two manifests of one measurement", "", name)
                right |= manifest.active
                ends.append(until_us)
            kept[device.manifests] = right
        _compare(device, kept[device.manifests], judging.terms.unlisted)
    return min(ends)


def check_topology(gpus: Sequence[Device], switches: Sequence[Device]) -> None:
    """Check 11: each GPU is connected with exactly these switches, and each switch with exactly these GPUs."""
    for ones, others in ((gpus, switches), (switches, gpus)):
        wanted = {other.pdi for other in others}
        for one in ones:
            if one.connected != wanted:
                numbers = (", ".join(sorted(each.hex() for each in side)) for side in (wanted, one.connected))
                raise _refusal(Code.GPU_TOPOLOGY, f"{one.place} is connected with devices without evidence", *numbers)


def check_bound(devices: Sequence[Device], bound: Bound) -> None:
    """Check 12: each report was asked for with this run's nonce."""
    for device in devices:
        if device.report.nonce != bound.gpu_nonce:
            numbers = bound.gpu_nonce.hex(), device.report.nonce.hex()
            raise _refusal(
                Code.HARDWARE_BINDING, f"{device.place}: a report for another run, challenge or key", *numbers
            )


def _device(each: DeviceReport, place: str, chain: Sequence[bytes], is_switch: bool, judging: Judging) -> Device:
    root = judging.roots.devices
    validity = _formed(Code.HARDWARE_CERTIFICATE, place, lambda: check_chain(chain, root))
    if not validity.has(judging.now_us):
        raise _refusal(Code.HARDWARE_CERTIFICATE, f"{place}: a certificate that is not of this time")
    until_us = judging.not_revoked(chain, root, 1 if judging.terms.device_ocsp else 2)
    leaf = certificate_of(chain[0])
    if not is_signed(each.report, _formed(Code.HARDWARE_CERTIFICATE, place, lambda: key_of(leaf))):
        raise _refusal(Code.HARDWARE_SIGNATURE, f"{place}: a report that its key did not sign")
    chip, pdi = _formed(Code.GPU_IDENTITY, place, lambda: _identity(certificate_of(chain[1])))
    report = _formed(Code.HARDWARE_MALFORMED, place, lambda: SpdmReport.parse(each.report))
    if (chip == SWITCH_CHIP) != is_switch or (is_switch and report.pdi != pdi):
        raise _refusal(Code.GPU_IDENTITY, f"{place}: a report of another device than its certificate's", "", chip)
    # A switch's report has no such field.
    if report.fwid != _fwid(leaf) and not (is_switch and report.fwid is None):
        raise _refusal(Code.GPU_IDENTITY, f"{place}: other firmware than its certificate's")
    return Device(
        place=place,
        chip=chip,
        pdi=pdi,
        report=report,
        manifests=_formed(Code.HARDWARE_MALFORMED, place, lambda: report.manifests(chip)),
        mode=_formed(Code.HARDWARE_MALFORMED, place, lambda: report.mode(is_switch)),
        connected=_formed(Code.HARDWARE_MALFORMED, place, lambda: report.connected(is_switch)),
        not_after_us=min(validity.not_after_us, until_us),
    )


def _manifest(name: str, version: str, judging: Judging) -> tuple[ReferenceManifest, int]:
    if name not in judging.terms.manifests:
        known = ", ".join(judging.terms.manifests)
        raise _refusal(Code.GPU_MANIFEST, "a driver or firmware that the policy does not name", known, name)
    item, root = f"nvidia/rim/{name}", judging.roots.manifests
    data = judging.collateral.named(item)
    found = _formed(Code.COLLATERAL_INVALID, item, lambda: manifest_of(data, root))
    if found.version.upper() != version.upper():
        raise _refusal(Code.COLLATERAL_INVALID, f"{item}: a manifest of another version", version, found.version)
    if not found.validity.has(judging.now_us):
        raise _refusal(Code.COLLATERAL_EXPIRED, f"{item}: its signer's certificate is not of this time")
    return found, min(found.validity.not_after_us, judging.not_revoked(found.chain, root, 0))


def _compare(device: Device, right: dict[int, frozenset[bytes]], unlisted: Sequence[int]) -> None:
    blocks = device.report.blocks
    wrong = {index for index, values in right.items() if blocks.get(index) not in values}
    # What is zero was not measured.
    wrong |= {index for index, value in blocks.items() if any(value)} - right.keys() - set(unlisted)
    if wrong or not right:
        indices = ", ".join(map(str, sorted(wrong)))
        message = f"{device.place}: measurements that NVIDIA's manifests do not have: {indices or 'all'}"
        raise _refusal(Code.GPU_MEASUREMENT, message)


def _identity(device: x509.Certificate) -> tuple[str, bytes]:
    """Return a device's chip, and the number that is burnt into it, as its certificate has them."""
    wanted = ((x509.NameOID.COMMON_NAME, _CHIP), (x509.NameOID.SERIAL_NUMBER, _SERIAL))
    found = []
    for oid, form in wanted:
        values = [form.fullmatch(str(each.value)) for each in device.subject.get_attributes_for_oid(oid)]
        if len(values) != 1 or values[0] is None:
            raise FormatError(Code.SCHEMA, "a device that is not known")
        found.append(values[0][1])
    return found[0], bytes.fromhex(found[1])


def _fwid(leaf: x509.Certificate) -> bytes | None:
    """Return the digest of the firmware that a report's key belongs to, the first where there are layers."""
    for each in leaf.extensions:
        if each.oid.dotted_string in _FWID_OIDS and isinstance(each.value, x509.UnrecognizedExtension):
            found = _FWID.search(each.value.value)
            return found[1] if found else b""
    return b""


def _formed(code: Code, what: str, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except FormatError as error:
        raise CheckFailedError("12", code, f"{what}: {error.message}") from None


def _refusal(code: Code, message: str, expected: str = "", actual: str = "") -> CheckFailedError:
    return CheckFailedError("12", code, message, expected=expected, actual=actual)
