"""The table of kinds of hardware evidence, and the sizes of theirs; `levels` has what each of them is good for."""

from __future__ import annotations

from dataclasses import dataclass

NVIDIA = "nvidia"
GCP_AUDIENCE = "https://glasshouse.dev/hardware/gcp/v1"  # that a token of Google's is asked for
MAX_BLOB_BYTES = 256 * 1024
MAX_BLOBS_BYTES = 416 * 1024  # of one piece of evidence
MAX_BLOBS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A root of trust and the format of its evidence: a row of the table, and two modules of its name."""

    # As evidence and policies name it; its folder in `attestation.roots` and its module in `runtime.roots` have `_`
    # for `-`.
    kind: str
    title: str  # for people
    offered_by: tuple[str, ...]  # paths, of which a machine that has it shows one; globs
    chains: tuple[str, ...] = ()  # from what it measures to the runtime, of which a policy names one
    needs: str = ""  # what the verifier needs beside the package itself: a module
    unseen: str = ""  # what its device does not show before evidence is collected
    word: str = ""  # whose word its evidence is, where no hardware signs it
    proves: str = ""  # what a verified receipt shows to whom, where that is less than its level's


KINDS = {
    row.kind: row
    for row in (
        Kind(kind="azure", title="Azure confidential VM", offered_by=("/dev/tpmrm0",), chains=("image",)),
        Kind(
            kind="dstack",
            title="dstack on TDX",
            offered_by=("/var/run/dstack.sock", "/var/run/dstack/dstack.sock"),
            chains=("workload",),
            needs="dcap_qvl",
        ),
        Kind(
            kind="gcp",
            title="GCP Confidential Space",
            offered_by=("/run/container_launcher/teeserver.sock",),
            chains=("workload",),
            word="Google's word about Google's machine",
            proves="To everyone it shows what Google said: that a machine of Google's ran this, in a container that "
            "the owner's policy lists. That is Google's word about Google's machine, which no hardware bears out; "
            "Google could have read the run's memory, and could have said it of a run that never happened.",
        ),
        Kind(kind=NVIDIA, title="NVIDIA confidential computing", offered_by=("/dev/nvidia[0-9]*",), needs="lxml"),
        Kind(
            kind="sev-snp",
            title="AMD SEV-SNP",
            offered_by=("/dev/sev-guest",),
            chains=("launch",),
            unseen="; whether its chip's certificate is there shows a report alone: glasshouse measure --hardware",
        ),
        Kind(kind="tdx", title="Intel TDX", offered_by=("/dev/tdx_guest",), chains=("image",), needs="dcap_qvl"),
        Kind(kind="tpm", title="TPM 2.0", offered_by=("/dev/tpmrm0",), chains=("image",)),
    )
}
