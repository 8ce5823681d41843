"""Public evidence of NVIDIA's GPUs.

`evidence` and `chain` are a report and its certificates, PEM, with the root, of one GPU. What OCSP said of a GPU and of
the manifests was kept on different days, so the manifests are judged `MANIFESTS_LATER`.

For some evidence neither OCSP's answers nor manifests are public: with `part` (any file) instead of collateral all else
is appraised. Then `gpus` and `switches` may be those of a node, as nvtrust keeps them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.claims import Gpu
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.nvidia import nvidia_evidence
from glasshouse.attestation.roots.nvidia.nvidia_blob import GpuMode, NvidiaBlob
from glasshouse.attestation.roots.nvidia.nvidia_evidence import Device, Judging
from tools.hardware_cases import HardwareCase

MANIFESTS_LATER = timedelta(days=64)


class AskedNonce(Bound):
    """What evidence was bound to that was not made for us."""

    __slots__ = ()

    @property
    def gpu_nonce(self) -> bytes:
        return self.composite


class WithoutOcsp(Judging):
    """Judges what was never asked about."""

    __slots__ = ()

    def asked(self, chain: Sequence[bytes]) -> list[int]:
        del chain
        return [2**53 - 1]


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> list[Device]:
    """Appraise the files; `bound` is the nonce that was asked with, and the claims are those of the first report."""
    assert case.policy.nvidia is not None
    is_part = "part" in files
    blob = _blob(files)
    driver = "590.12" if "gpus" in files else "590.48.01" if is_part else "550.90.07"
    gpu = Gpu(name="NVIDIA", memory_bytes=1, driver=driver, uuid="GPU-1")
    bound = AskedNonce(composite=case.bound or bytes(32), gpus=(gpu,) * case.policy.nvidia.gpus)
    judging = (WithoutOcsp if is_part else Judging)(now_us=case.now_us, collateral=pack, policy=case.policy)
    evidence = nvidia_evidence.read_blob(blob, bound, judging.terms)
    devices = nvidia_evidence.check_devices(evidence, bound, judging)
    if not is_part:
        later = replace(judging, now_us=case.now_us + MANIFESTS_LATER // timedelta(microseconds=1))
        nvidia_evidence.check_manifests(devices, later)
    nvidia_evidence.check_topology(devices[: len(evidence.gpus)], devices[len(evidence.gpus) :])
    nvidia_evidence.check_bound(devices, bound)
    return devices


def _blob(files: Mapping[str, bytes]) -> bytes:
    if "gpus" in files:
        gpus, switches = (
            [
                (base64.b64decode(each["evidence"]), _chain(base64.b64decode(each["certificate"])))
                for each in json.loads(files[role])
            ]
            for role in ("gpus", "switches")
        )
        return NvidiaBlob.of(devtools=False, mode=GpuMode.PPCIE, gpus=gpus, switches=switches).encode()
    mode = GpuMode.MPT if "part" in files else GpuMode.SPT
    return NvidiaBlob.of(devtools=False, mode=mode, gpus=[(files["evidence"], _chain(files["chain"]))]).encode()


def _chain(pem: bytes) -> list[bytes]:
    return [each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(pem)]
