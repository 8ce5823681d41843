"""Check 12, second half: the hardware evidence beside the claims is complete, genuine, acceptable and of this run.

Law: a level is proven or refused; nothing is lowered, and nothing is appraised that the level does not want.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from glasshouse.attestation.claims import composite
from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.kinds import KINDS, NVIDIA
from glasshouse.attestation.roots.levels import LEVELS
from glasshouse.attestation.roots.refusing import refusal
from glasshouse.errors import Code
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import sha256


class Appraise(Protocol):
    """The pure half of a root of trust: `appraise` of `attestation.roots.KIND.KIND_evidence`."""

    def __call__(
        self, blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy
    ) -> Appraised:
        """Appraise the evidence.

        Args:
            blob: its digest was checked, and nothing else.
            now_us: when certificates and collateral must be valid.
            policy: it names this kind.

        Raises:
            CheckFailedError: check 12, with a code of spec/hardware-evidence.md.
        """


def check_12_kinds(evidence: Evidence) -> None:
    """The listed kinds are those that the claimed level wants, each once; raises `CheckFailedError`."""
    level, kinds = LEVELS[evidence.claims.assurance], [blob.kind for blob in evidence.hardware]
    if level.complete(kinds):
        return
    known = level.one_of | level.beside
    is_short = len(set(kinds) & level.one_of) < bool(level.one_of) or not level.beside <= set(kinds)
    raise CheckFailedError(
        "12",
        Code.HARDWARE_MISSING if is_short else Code.HARDWARE_UNEXPECTED,
        f"hardware evidence that does not complete the level {level.assurance}",
        expected=", ".join(sorted(known)) or "none",
        actual=", ".join(sorted(kinds)) or "none",
    )


def check_12_hardware(
    evidence: Evidence,
    blobs: Mapping[str, bytes],
    *,
    bound: Bound,
    now_us: int,
    collateral: Pack,
    policy: HardwarePolicy | None,
    known: Mapping[str, Appraised] | None = None,
) -> dict[str, Appraised]:
    """Appraise every blob; return what each kind amounts to.

    Args:
        blobs: by kind, of the digests that the evidence names.
        known: what this came to before, for the same evidence, keys and pack: expiry and policy are looked at again.

    Raises:
        CheckFailedError: of the first kind that does not hold, a processor's after the GPUs'.
    """
    check_12_kinds(evidence)
    if not evidence.hardware:
        return {}
    listed = {blob.kind for blob in evidence.hardware}
    if policy is None or blobs.keys() != listed:
        raise CheckFailedError(
            "12",
            Code.HARDWARE_UNEXPECTED if policy is None else Code.HARDWARE_MISSING,
            "hardware evidence for a policy without any" if policy is None else "hardware evidence that did not come",
            expected="none" if policy is None else ", ".join(sorted(listed)),
            actual=", ".join(sorted(listed if policy is None else blobs)) or "none",
        )
    found = {}
    for kind in sorted(blobs, key=lambda name: (name != NVIDIA, name)):
        if kind not in policy.kinds:
            raise CheckFailedError(
                "12", Code.CHAIN_MISSING, f"the policy names no {kind}", expected="a policy that names it", actual=kind
            )
        if known is not None and kind in known and now_us < known[kind].not_after_us:
            found[kind] = known[kind]
            continue
        found[kind] = _appraiser(kind)(blobs[kind], bound=bound, now_us=now_us, collateral=collateral, policy=policy)
    return found


# By which claims of a kind its device is known, and the refusal where two machines of a group show one.
_OF_ONE_MACHINE = {NVIDIA: (("gpus", "switches"), Code.GPU_COUNT), "tpm": (("ak", "ek_sha256"), Code.TPM_KEY)}


def check_12_apart(machines: Iterable[Mapping[str, Appraised]]) -> None:
    """No GPU, switch or TPM counts for two machines of a group.

    Processors are not compared: several confidential machines may lie on one chip.

    Args:
        machines: of each what its kinds amount to, in order.

    Raises:
        CheckFailedError: `gpu-count` or `tpm-key`, about a device of the last machine that shows one of another's.
    """
    seen: set[Json] = set()
    for roots in machines:
        here: set[Json] = set()
        for kind in roots.keys() & _OF_ONE_MACHINE.keys():
            claims, code = _OF_ONE_MACHINE[kind]
            for value in (roots[kind].claims.get(claim) for claim in claims):
                named = set(value if isinstance(value, list) else [value]) - {None}
                if shared := named & seen:
                    message = f"a device of the kind {kind} that another machine of the group shows too"
                    raise refusal(code, message, "each once", sorted(map(str, shared)))
                here |= named
        seen |= here


def bound_of(
    evidence: Evidence,
    blobs: Mapping[str, bytes],
    *,
    ak: bytes | None,
    ek: bytes | None = None,
    secret: bytes | None,
    is_repeated: bool = False,
) -> Bound:
    """Return what the blobs of this evidence have to be bound to."""
    return Bound(
        composite=composite(evidence.claims),
        gpus_sha256=sha256(blobs[NVIDIA]) if NVIDIA in blobs else b"",
        gpus=evidence.claims.gpus,
        ak=ak,
        ek=ek,
        secret=secret,
        is_repeated=is_repeated,
    )


def _appraiser(kind: str) -> Appraise:
    name = kind.replace("-", "_")
    try:
        module = importlib.import_module(f"glasshouse.attestation.roots.{name}.{name}_evidence")
    except ModuleNotFoundError as error:
        if error.name is not None and KINDS[kind].needs.startswith(error.name.split(".")[0]):
            raise CheckFailedError(
                "12",
                Code.HARDWARE_VERIFIER,
                f"this gate lacks what appraises {kind}: pip install 'glasshouse-train[hardware]'",
                expected=KINDS[kind].needs,
                actual="not installed",
            ) from None
        raise
    appraise: Appraise = module.appraise
    return appraise
