"""What of a hardware policy a machine's evidence shows, kind by kind, and what each value is to be compared with.

Law: nothing is appraised, and no chain is named: what a machine says of itself is compared by its owner first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.azure.azure_blob import AzureBlob
from glasshouse.attestation.roots.dstack.dstack_events import DstackBlob
from glasshouse.attestation.roots.foreign_json import read_foreign
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.attestation.roots.nvidia.nvidia_blob import NvidiaBlob
from glasshouse.attestation.roots.nvidia.spdm_report import SpdmReport
from glasshouse.attestation.roots.sev_snp.amd_certificates import VekCertificate
from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import GUEST_BITS
from glasshouse.attestation.roots.sev_snp.snp_products import parts_of, product_of
from glasshouse.attestation.roots.sev_snp.snp_report import SnpReport
from glasshouse.attestation.roots.tdx.tdx_quote import TdxBlob, TdxQuote
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_quote import check_ak
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json, b64decode

CHAINS = {
    "azure": "image",
    "dstack": "workload",
    "gcp": "workload",
    "sev-snp": "launch",
    "tdx": "image",
    "tpm": "image",
}
_FMSPC = bytes.fromhex("060a2a864886f84d010d01040406")  # before it in a processor's certificate
_EVALUATION = 17  # Intel's of 2025
_SMT = 16  # bit of a guest policy
_UNUSED = bytes(32)  # a register that nothing was measured into


def values_of(kind: str, blob: bytes) -> dict[str, Json]:
    """Return the policy's object of a kind but for its chain; raises `FormatError`."""
    return _SHOWN[kind](blob)


def _tpm(blob: bytes) -> dict[str, Json]:
    found = TpmBlob.parse(blob)
    return {"aks": [check_ak(found.ak).hex()], "pcrs": _pcrs(found.pcrs)}


def _pcrs(values: Sequence[bytes]) -> dict[str, Json]:
    """Return the registers that a policy needs, by what booted: a unified kernel image, GRUB, or systemd-boot."""
    found = dict(zip(QUOTED_PCRS, values, strict=True))
    used = {index for index, value in found.items() if value != _UNUSED}
    system = (11, 12, 13) if 11 in used else (8, 9) if 8 in used else (9, 12)
    return {str(index): [found[index].hex()] for index in (0, 2, 4, 7, *system)}


def _tdx(blob: bytes) -> dict[str, Json]:
    return _quote(TdxBlob.parse(blob).quote)


def _dstack(blob: bytes) -> dict[str, Json]:
    found = DstackBlob.parse(blob)
    written = {event.name: event.payload for event in reversed(found.events)}
    return {
        "compose_hashes": [written.get("compose-hash", b"").hex()],
        "key_providers": [written.get("key-provider", b"").decode("latin-1")],
        **_quote(found.quote),
    }


def _gcp(blob: bytes) -> dict[str, Json]:
    said = read_foreign(b64decode(blob.decode().split(".")[1]))
    return {
        "accept_issuers_word": False,
        "hwmodels": [said["hwmodel"]],
        "image_digests": [said["submods"]["container"]["image_digest"].removeprefix("sha256:")],
        "least_swversion": int(said["swversion"][0]),
        "projects": [said["submods"]["gce"]["project_id"]],
    }


def _quote(raw: bytes) -> dict[str, Json]:
    quote = TdxQuote.parse(raw)
    shown, extensions = quote.report, quote.chain[0].public_bytes(Encoding.DER)
    found: dict[str, Json] = {
        "fmspcs": [extensions.partition(_FMSPC)[2][:6].hex().upper()],
        "images": [{"mrtd": shown.mrtd.hex(), "rtmr0": [shown.rtmr0.hex()], "rtmr1": shown.rtmr1.hex(),
                    "rtmr2": shown.rtmr2.hex()}],
        "tcb_evaluation": _EVALUATION,
    }  # fmt: skip
    return found if shown.mrconfigid == bytes(48) else found | {"config_ids": [shown.mrconfigid.hex()]}


def _sev_snp(blob: bytes) -> dict[str, Json]:
    found = SevSnpBlob.parse(blob)
    return {"measurements": [SnpReport.parse(found.report).measurement.hex()], **_report(found)}


def _azure(blob: bytes) -> dict[str, Json]:
    found = AzureBlob.parse(blob)
    shown = _report(SevSnpBlob(certificate=found.certificate, report=found.report))
    return {"pcrs": _pcrs(found.pcrs), "sev-snp": {"chain": "launch", **shown}}


def _report(found: SevSnpBlob) -> dict[str, Json]:
    report = SnpReport.parse(found.report)
    product, tcbs = product_of(*report.processor), report.tcbs.values()
    if not product:
        why = "a report of family {:#x}, model {:#x}, none of AMD's products that are known".format(*report.processor)
        raise FormatError(Code.HARDWARE_MALFORMED, why)
    shown: dict[str, Json] = {
        "least_firmware": ".".join(map(str, report.committed)),
        "least_guest_svn": report.guest_svn,
        "requires": [name for name, bit in GUEST_BITS.items() if report.guest_policy >> bit & 1],
        "smt": bool(report.guest_policy >> _SMT & 1),
        "tcb": {product: {part: min(tcb[at] for tcb in tcbs) for part, at in parts_of(product).items()}},
        "vmpl": report.vmpl,
    }
    if any(report.id_key):
        shown["id_keys"] = [report.id_key.hex()]
    if report.has_author_key:
        shown["author_keys"] = [report.author_key.hex()]
    if report.is_vlek:
        shown["csps"] = [VekCertificate.parse(found.certificate, PINNED).csp]
    return dict(sorted(shown.items()))


def _nvidia(blob: bytes) -> dict[str, Json]:
    found = NvidiaBlob.parse(blob)
    names = set[str]()
    for device in (*found.gpus, *found.switches):
        certificate = x509.load_der_x509_certificate(found.certificates[device.chain[1]])
        name = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
        names |= SpdmReport.parse(device.report).manifests(str(name).split()[0]).keys()
    shown: dict[str, Json] = {"device_ocsp": False, "gpus": len(found.gpus), "manifests": sorted(names)}
    return shown | ({"switches": len(found.switches)} if found.switches else {})


_SHOWN: Mapping[str, Callable[[bytes], dict[str, Json]]] = {
    "azure": _azure,
    "dstack": _dstack,
    "gcp": _gcp,
    "nvidia": _nvidia,
    "sev-snp": _sev_snp,
    "tdx": _tdx,
    "tpm": _tpm,
}

NOTES = {
    "accept_issuers_word": f"Your choice, and a policy is none without true: all of it is {KINDS['gcp'].word}.",
    "aks": "The key that this TPM signs with, so this machine alone. Compare: read it again after you installed the "
    'machine yourself. ek_roots = ["maker.pem"] in its place takes each TPM of a maker, activated.',
    "author_keys": "SHA-384 of the key that signed the ID key, from the report. Compare: is it the one you made?",
    "azure.sev-snp": "From the report that the paravisor keeps. It is about firmware and paravisor, not about your "
    "image.",
    "compose_hashes": "From the launcher's event compose-hash. Compare: sha256sum app-compose.json, of your own copy.",
    "config_ids": "MRCONFIGID, which the host chose. Compare: what you told it to be; if you told nothing, ask why.",
    "csps": "The cloud that signed in the chip's place, from its certificate. Compare: do you rent from it?",
    "device_ocsp": "Your choice, and not of the machine: true asks NVIDIA about each GPU itself too.",
    "fmspcs": "The processor's family, from its certificate. Compare: what your provider says that it runs.",
    "gpus": "As many as the driver shows. Compare: as many as you rent.",
    "hwmodels": "As Google names the machine. Compare: what you rent.",
    "image_digests": "Of the container's manifest, by Google's word. Compare: the digest of your own build.",
    "id_keys": "SHA-384 of the key that signed the ID block, from the report. Compare: is it yours, or the one that "
    "your cloud publishes for its paravisor?",
    "images": "From the quote: firmware (mrtd), its configuration (rtmr0), kernel (rtmr1), command line and initrd "
    "(rtmr2), of this shape of machine. Compare: what you computed from the image (dstack: dstack-mr, for this "
    "release, processors and memory).",
    "key_providers": "From the event key-provider: who has the key of the disk. Compare: the key of the KMS that you "
    "chose.",
    "least_firmware": "COMMITTED of the report. Compare: AMD's newest for this processor; a higher one refuses older "
    "hosts.",
    "least_guest_svn": "From the report. Compare: the number of your ID block, or of your cloud's present paravisor.",
    "least_swversion": "Of the machine's image, by Google's word. Compare: Google's present one.",
    "manifests": "Driver and firmware, as each report names them, unverified here. Compare: the driver that you or "
    "your provider installed; `glasshouse collateral fetch` refuses a name that NVIDIA does not publish.",
    "measurements": "MEASUREMENT of the report. Compare: sev-snp-measure over your firmware, kernel, initrd and "
    "command line. Of firmware without their hashes it says nothing about what booted.",
    "pcrs": "Read from the TPM. Compare: each register on a machine of yours that booted the same image, or as "
    "computed from it (systemd-pcrlock, systemd-measure). What each holds: spec/hardware-evidence.md, 7.1.",
    "projects": "Whose machine it is, by Google's word. Compare: the project that you rent by.",
    "requires": "What the guest was launched to demand. Compare: the launch policy that you gave.",
    "smt": "Whether the guest was launched to share cores. Compare: the launch policy that you gave.",
    "switches": "As many as the driver's library shows. Compare: four in a machine of eight H100.",
    "tcb": "The lowest of reported, committed, current and launch, from the report. Compare: AMD's security "
    "bulletins; firmware with known holes has a number too.",
    "tcb_evaluation": "Not of the machine: an older one of Intel's. Compare: the present number, which `glasshouse "
    "collateral show` has when the lists were fetched; a higher one refuses older lists.",
    "vmpl": "The privilege level that asked. Compare: 0 where nothing of yours lies beneath the kernel.",
}
"""Of a member, by its name or its path: where its value comes from, and what an owner compares it with."""
