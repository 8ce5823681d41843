"""A file of `[policy] hardware`: what hardware evidence has to show, in TOML.

It is the object `hardware` of a deployment's policy (spec/hardware-evidence.md, 4 and 7); where that has certificates,
the name of a PEM file beside it stands for those in it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.policy import MAX_POLICY_BYTES
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code, FormatError, RefusedError, UsageError
from glasshouse.jobs.owner.home import read_bounded
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.policy import Assurance

_PEM = ".pem"
_OBJECTS = "spec/hardware-evidence.md has each kind's object; examples/hardware has some to begin with"
_DRAFT = "in a draft compare each value first, then take the # from before its line `chain`"
_OWN = frozenset({Code.CHAIN_MISSING, Code.POLICY_IMPOSSIBLE})


def read_hardware(path: Path) -> HardwarePolicy:
    """Read a file.

    Raises:
        UsageError: `file-missing`; `job-invalid` for what is none, `chain-missing` or `policy-impossible` for one that
            leads from no hardware to the runtime.
    """
    data = read_bounded(path, max_bytes=4 * MAX_POLICY_BYTES, what="hardware policy")
    try:
        policy = HardwarePolicy.from_json(_filled(tomllib.loads(data.decode()), path.parent))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = f"the hardware policy {path} is not TOML: {str(error).splitlines()[0]}"
        raise UsageError(Code.JOB_INVALID, why) from None
    except FormatError as error:
        code = error.code if error.code in _OWN else Code.JOB_INVALID
        hint = _DRAFT if code is Code.CHAIN_MISSING else _OBJECTS
        raise UsageError(code, f"the hardware policy {path}: {error.message}", hint=hint) from None
    if not policy.kinds:
        raise UsageError(Code.CHAIN_MISSING, f"the hardware policy {path} names no kind of evidence", hint=_OBJECTS)
    return policy


def kinds_wanted(assurance: Assurance, hardware: HardwarePolicy | None) -> tuple[str, ...]:
    """Return the kinds of evidence that a run at this level is to collect; none at the level `software`.

    Raises:
        UsageError: `chain-missing` where the policy does not lead to this level, `job-invalid` where nothing asks
            for it.
    """
    if hardware is None:
        if assurance is Assurance.SOFTWARE:
            return ()
        raise UsageError(
            Code.CHAIN_MISSING,
            f'policy.assurance = "{assurance}" needs policy.hardware: which machines count, and what leads from their '
            "measurement to the runtime",
            hint="glasshouse measure --hardware drafts one on the machine; docs/security/hardware.md says what of it "
            "can be relied on",
        )
    if assurance is Assurance.SOFTWARE:
        raise UsageError(
            Code.JOB_INVALID,
            'policy.hardware is for levels above policy.assurance = "software", which looks at no hardware',
            hint="take it out, or name the level that it is for",
        )
    try:
        return hardware.wanted(assurance)
    except RefusedError as error:
        raise UsageError(error.code, error.message) from None


def _filled(value: Any, folder: Path) -> Any:
    """Return it with the certificates of each PEM file in place of its name in a list."""
    if isinstance(value, dict):
        return {name: _filled(one, folder) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for one in value:
        is_file = isinstance(one, str) and one.endswith(_PEM)  # neither base64url nor hexadecimal has a dot
        found += _certificates(folder / one) if is_file else [_filled(one, folder)]
    return found


def _certificates(path: Path) -> list[str]:
    data = read_bounded(path, max_bytes=MAX_POLICY_BYTES, what="certificate file")
    try:
        return [b64encode(one.public_bytes(Encoding.DER)) for one in x509.load_pem_x509_certificates(data)]
    except ValueError as error:
        raise UsageError(Code.JOB_INVALID, f"{path} has no certificates in PEM: {error}") from None
