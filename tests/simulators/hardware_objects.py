"""One object of each kind for the member `hardware` of a policy, the least that leads to a runtime."""

from __future__ import annotations

from typing import Any

_DIGEST, _LONG = "ab" * 32, "cd" * 48


def hardware_objects() -> dict[str, dict[str, Any]]:
    """Return them by kind."""
    pcrs = {str(register): [_DIGEST] for register in (0, 2, 4, 7, 8, 9)}
    snp = {
        "chain": "launch",
        "measurements": [_LONG],
        "tcb": {"Genoa": {"bootloader": 10, "microcode": 84, "snp": 23, "tee": 0}},
    }
    tdx: dict[str, Any] = {
        "fmspcs": ["90C06F000000"],
        "images": [{"mrtd": _LONG, "rtmr0": [_LONG], "rtmr1": _LONG, "rtmr2": _LONG}],
        "tcb_evaluation": 17,
    }
    return {
        "azure": {"chain": "image", "pcrs": pcrs, "sev-snp": snp},
        "dstack": tdx
        | {"chain": "workload", "compose_hashes": [_DIGEST], "key_providers": ['{"name":"kms","id":"3059"}']},
        "gcp": {
            "accept_issuers_word": True,
            "chain": "workload",
            "hwmodels": ["GCP_INTEL_TDX"],
            "image_digests": [_DIGEST],
            "least_swversion": 250800,
        },
        "nvidia": {"device_ocsp": False, "gpus": 8, "manifests": ["NV_GPU_DRIVER_GH100_550.90.07"]},
        "sev-snp": snp,
        "tdx": tdx | {"chain": "image"},
        "tpm": {"aks": ["000b" + _DIGEST], "chain": "image", "pcrs": pcrs},
    }
