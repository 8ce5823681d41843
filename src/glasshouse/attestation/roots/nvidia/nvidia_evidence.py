"""The kind `nvidia`: each GPU of the job, and each switch between them, is genuine, in its right state and of this run.

Source: spec/hardware-evidence.md, section 7.5, whose checks have these numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from cryptography import x509

from glasshouse.attestation.roots.appraised import CHAINED_VECTOR, Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.nvidia import nvidia_certificates as certificates
from glasshouse.attestation.roots.nvidia.nvidia_blob import GpuMode, NvidiaBlob
from glasshouse.attestation.roots.nvidia.nvidia_policy import NvidiaPolicy
from glasshouse.attestation.roots.nvidia.reference_manifest import ReferenceManifest, manifest_of
from glasshouse.attestation.roots.nvidia.spdm_report import SIGNATURE_BYTES, SWITCH_CHIP, SpdmReport, is_signed
from glasshouse.attestation.roots.refusing import refusal, refused, require
from glasshouse.errors import Code, FormatError

_FWID_OIDS = ("2.23.133.5.4.1", "2.23.133.5.4.1.1")  # of Hopper and switches, of Blackwell
_FWID = re.compile(bytes.fromhex("303d0609608648016503040202") + rb"\x04\x30(.{48})", re.DOTALL)  # of SHA-384
_SERIAL = re.compile(r"[0-9A-F]{2}([0-9A-F]{16})")  # a device's; most of it is the number that is burnt into it
_CHIP = re.compile(rf"(GH100|GB[12][0-9]{{2}}|{SWITCH_CHIP}) .*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """By what, and when, evidence is appraised."""

    now_us: int
    collateral: Pack
    policy: HardwarePolicy
    device_root_sha256: bytes = certificates.DEVICE_ROOT_SHA256
    manifest_root_sha256: bytes = certificates.MANIFEST_ROOT_SHA256

    @property
    def terms(self) -> NvidiaPolicy:
        """The policy's object of this kind."""
        if self.policy.nvidia is None:
            raise refusal(Code.CHAIN_MISSING, "the policy names no nvidia")
        return self.policy.nvidia

    def asked(self, chain: Sequence[bytes]) -> list[int]:
        """Ask about each certificate but the root; return when the answers end."""
        ages = {"pack": self.collateral, "now_us": self.now_us, "max_age_s": self.policy.collateral.ocsp}
        return [certificates.check_good(child, parent, **ages) for child, parent in pairwise(chain)]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU or switch whose certificates and signature held."""

    place: str  # for people
    pdi: bytes  # the number that is burnt into it, by its certificate
    report: SpdmReport
    mode: GpuMode
    manifests: dict[str, tuple[str, str, str]]  # of its driver and firmware, and what each is of
    connected: frozenset[bytes]  # numbers of what is connected with it
    end_us: int


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the evidence by NVIDIA's own roots; see `root_table.Appraise`."""
    return appraise_by(blob, bound, Judging(now_us=now_us, collateral=collateral, policy=policy))


def appraise_by(blob: bytes, bound: Bound, judging: Judging) -> Appraised:
    """Appraise the evidence by other roots; raises `CheckFailedError`, in the order of the specification."""
    evidence = read_blob(blob, bound, judging.terms)
    devices = check_devices(evidence, bound, judging)
    end_us = min(check_manifests(devices, judging), *(device.end_us for device in devices))
    gpus, switches = devices[: len(evidence.gpus)], devices[len(evidence.gpus) :]
    check_topology(gpus, switches)
    check_bound(devices, bound)
    return Appraised(
        vector={**CHAINED_VECTOR, "hardware": 2, **({"instance-identity": 2} if judging.terms.device_ocsp else {})},
        not_after_us=end_us,
        claims={
            "gpus": [gpu.pdi.hex() for gpu in gpus],
            "manifests": sorted({name for device in devices for name in device.manifests}),
            "mode": str(evidence.mode),
            "switches": [switch.pdi.hex() for switch in switches],
        },
    )


def read_blob(blob: bytes, bound: Bound, terms: NvidiaPolicy) -> NvidiaBlob:
    """Checks 1 to 3."""
    with refused(Code.HARDWARE_MALFORMED, "the blob nvidia"):
        evidence = NvidiaBlob.parse(blob)
    wanted = (terms.gpus, terms.gpus, terms.switches)
    found = (len(evidence.gpus), len(bound.gpus), len(evidence.switches))
    if wanted != found:
        counts = ("{} GPUs, {} of them in the claims, {} switches".format(*each) for each in (wanted, found))
        raise refusal(Code.GPU_COUNT, "evidence of another number of devices", *counts)
    if evidence.devtools:
        raise refusal(Code.HARDWARE_DEBUG, "the driver is in the mode for developer tools, which protects nothing")
    modes = [GpuMode.PPCIE] if terms.switches else [GpuMode.SPT, GpuMode.MPT]
    if evidence.mode not in modes:
        raise refusal(Code.GPU_MODE, "the driver protects the GPUs in another mode", modes, evidence.mode)
    return evidence


def check_devices(evidence: NvidiaBlob, bound: Bound, judging: Judging) -> list[Device]:
    """Checks 4 to 9, of each GPU and then of each switch."""
    devices: list[Device] = []
    for number, each in enumerate((*evidence.gpus, *evidence.switches)):
        is_switch = number >= len(evidence.gpus)
        place = f"switch {number - len(evidence.gpus)}" if is_switch else f"GPU {number}"
        chain = [evidence.certificates[one] for one in each.chain]
        device = _device(place, is_switch, chain, each.report, judging)
        if not is_switch and any(claimed.driver != device.report.driver for claimed in bound.gpus):
            raise refusal(Code.GPU_IDENTITY, f"{place} has another driver than the claims say")
        if device.pdi in {other.pdi for other in devices}:
            raise refusal(Code.GPU_COUNT, f"{place} is there twice", "each once", device.pdi)
        if device.mode is not evidence.mode:
            message = f"{place} is in another mode than the driver says"
            raise refusal(Code.GPU_MODE, message, evidence.mode, device.mode)
        devices.append(device)
    return devices


def _device(place: str, is_switch: bool, chain: Sequence[bytes], data: bytes, judging: Judging) -> Device:
    with refused(Code.HARDWARE_CERTIFICATE, place):
        leaf = certificates.check_chain(chain, judging.device_root_sha256)
    end_us = certificates.check_dates(chain, judging.now_us, Code.HARDWARE_CERTIFICATE, place)
    ends = judging.asked(chain[1 if judging.terms.device_ocsp else 2 :])
    if not is_signed(data[:-SIGNATURE_BYTES], leaf.key, data[-SIGNATURE_BYTES:]):
        raise refusal(Code.HARDWARE_SIGNATURE, f"{place}: a report that its key did not sign")
    with refused(Code.HARDWARE_MALFORMED, place):
        report = SpdmReport.parse(data)
    with refused(Code.GPU_IDENTITY, place):
        chip, pdi = _identity(certificates.read_certificate(chain[1]).parsed)
        is_its = (chip == SWITCH_CHIP) is is_switch and not (is_switch and report.pdi != pdi)
        require(is_its, "a report of another device than its certificate's")
        # A switch does not say which firmware it has.
        is_its = report.fwid == _fwid(leaf.parsed) or (is_switch and not report.fwid)
        require(is_its, "other firmware than its certificate's")
    with refused(Code.HARDWARE_MALFORMED, place):
        return Device(
            place=place,
            pdi=pdi,
            report=report,
            mode=report.mode(is_switch),
            manifests=report.manifests(chip),
            connected=report.connected(is_switch),
            end_us=min(end_us, *ends),
        )


def check_manifests(devices: Sequence[Device], judging: Judging) -> int:
    """Check 10; return when the first of what it rests on ends."""
    read = cache(partial(_manifest, judging))
    ends: list[int] = []
    for device in devices:
        right: dict[int, frozenset[bytes]] = {}
        for name, about in device.manifests.items():
            manifest, end_us = read(name, about)
            if right.keys() & manifest.active.keys():
                raise refusal(Code.GPU_MANIFEST, f"{device.place}: two manifests of one measurement", "", name)
            right |= manifest.active
            ends.append(end_us)
        blocks = device.report.blocks
        wrong = {index for index, values in right.items() if blocks.get(index) not in values}
        # What is zero was not measured.
        wrong |= {index for index, value in blocks.items() if any(value)} - right.keys() - set(judging.terms.unlisted)
        if wrong or not right:
            indices = ", ".join(map(str, sorted(wrong))) or "all"
            message = f"{device.place}: measurements that NVIDIA's manifests do not have: {indices}"
            raise refusal(Code.GPU_MEASUREMENT, message)
    return min(ends)


def _manifest(judging: Judging, name: str, about: tuple[str, str, str]) -> tuple[ReferenceManifest, int]:
    if name not in judging.terms.manifests:
        known = judging.terms.manifests
        raise refusal(Code.GPU_MANIFEST, "a driver or firmware that the policy does not name", known, name)
    item = f"nvidia/rim/{name}"
    with refused(Code.COLLATERAL_INVALID, item):
        found = manifest_of(judging.collateral.named(item), judging.manifest_root_sha256)
    if found.about != about:  # a manifest does not have its own name: another's could be in its place
        message = f"{item}: a manifest of another product or version"
        raise refusal(Code.COLLATERAL_INVALID, message, about, found.about)
    end_us = certificates.check_dates(found.chain, judging.now_us, Code.COLLATERAL_EXPIRED, item)
    return found, min(end_us, *judging.asked(found.chain))


def check_topology(gpus: Sequence[Device], switches: Sequence[Device]) -> None:
    """Check 11."""
    for ones, others in ((gpus, switches), (switches, gpus)) if switches else ():
        wanted = {other.pdi for other in others}
        for one in ones:
            if one.connected != wanted:
                message = f"{one.place} is connected with devices without evidence"
                raise refusal(Code.GPU_TOPOLOGY, message, sorted(wanted), sorted(one.connected))


def check_bound(devices: Sequence[Device], bound: Bound) -> None:
    """Check 12."""
    for device in devices:
        if device.report.nonce != bound.gpu_nonce:
            message = f"{device.place}: of another run, challenge or key"
            raise refusal(Code.HARDWARE_BINDING, message, bound.gpu_nonce, device.report.nonce)


def _identity(device: x509.Certificate) -> tuple[str, bytes]:
    """Return a device's chip, and the number that is burnt into it, as its certificate has them."""
    oids = (x509.NameOID.COMMON_NAME, x509.NameOID.SERIAL_NUMBER)
    names = [[str(each.value) for each in device.subject.get_attributes_for_oid(oid)] for oid in oids]
    found = [form.fullmatch(one[0]) for form, one in zip((_CHIP, _SERIAL), names, strict=True) if len(one) == 1]
    if len(found) != len(oids) or found[0] is None or found[1] is None:
        raise FormatError(Code.SCHEMA, "a device that is none of Hopper, Blackwell or their switches")
    return found[0][1], bytes.fromhex(found[1][1])


def _fwid(leaf: x509.Certificate) -> bytes | None:
    """Return the digest of the firmware that a report's key belongs to, the first where there are layers."""
    for each in leaf.extensions:
        if each.oid.dotted_string in _FWID_OIDS and isinstance(each.value, x509.UnrecognizedExtension):
            found = _FWID.search(each.value.value)
            return found[1] if found else None
    return None
