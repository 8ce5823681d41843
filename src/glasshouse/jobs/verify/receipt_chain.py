"""The walk along a receipt bundle: owner → delegation → manifest → token → evidence → EAR → head → receipt.

The steps and their numbers are those of spec/evidence.md section 8. Each link has a code of its own: the
first that does not hold names it. A part that is missing breaks nothing here and proves nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from glasshouse.attestation import verify as genuine
from glasshouse.attestation.claims import Claims, consistent
from glasshouse.attestation.ear import Ear
from glasshouse.attestation.evidence import Evidence, SignedEvidence
from glasshouse.attestation.roots.root_table import check_12_kinds
from glasshouse.errors import Code, FormatError, GlasshouseError, VerificationError
from glasshouse.evidence.bundle import Bundle, CountersignedReceipt, HardwareParts
from glasshouse.evidence.heads import CountersignedHead, Head
from glasshouse.evidence.receipt import CLOCK_LEEWAY_US, Receipt
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.launch import TokenClaims, parse_token_at_issue
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.wire import jwt
from glasshouse.wire.crypto import key_id, sha256
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.states import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The links of a bundle, each found to be genuine and to fit the ones before it."""

    delegation: Delegation
    manifest: Manifest | None  # None where the bundle has none
    token: TokenClaims
    token_sha256: bytes  # of the compact text
    claims: Claims | None
    evidence: Evidence | None  # what the claims are of
    hardware: HardwareParts | None  # its blobs, and what they are appraised by
    ear: Ear | None
    head: Head
    countersigned_head: CountersignedHead | None
    receipt: Receipt
    countersignature: CountersignedReceipt | None
    missing: tuple[str, ...]  # the parts that are not there, by their name in the bundle

    @property
    def closed_us(self) -> int:
        """When the broker countersigned the end of the run; without that, its end by the runtime's clock."""
        if self.countersignature:
            return self.countersignature.time_us
        return self.countersigned_head.time_us if self.countersigned_head else self.receipt.finished_us


@contextmanager
def _link(code: Code) -> Iterator[None]:
    """Give every failure within the code of the link that it breaks."""
    try:
        yield
    except GlasshouseError as error:
        raise VerificationError(code, error.message) from None


def _same(code: Code, what: str, holds: bool) -> None:
    if not holds:
        raise VerificationError(code, f"{what} does not fit the link before it")


def walk(data: bytes, *, owner: bytes) -> Chain:
    """Verify every link that a bundle has, by the owner's signing key, which is known from elsewhere.

    Raises:
        FormatError: the file is not a bundle (step 1).
        VerificationError: with the code of the first link that does not hold.
    """
    bundle = Bundle.parse(data)  # 1
    _check_owner(bundle, owner)
    with _link(Code.CHAIN_DELEGATION):
        delegation = Delegation.from_envelope(bundle.delegation, owner)
        for use in sorted(RUN_USES):
            _same(Code.CHAIN_DELEGATION, f"a delegation without the use {use}", use in delegation.uses)
    broker = delegation.broker_public
    with _link(Code.CHAIN_MANIFEST):  # 4
        manifest = parse_signed(bundle.manifest.encode(), owner) if bundle.manifest else None
    token = _token(bundle, broker, manifest)
    signed = _evidence(bundle, token)
    ear = _ear(bundle, broker, manifest, token, signed)
    with _link(Code.CHAIN_RECEIPT):  # without evidence the key is the receipt's, which the launch key signs too
        claimed = signed.evidence.claims if signed else Receipt.parse(bundle.receipt.payload)
    evidence_public = claimed.evidence_public
    head, countersigned_head = _head(bundle, broker, token, evidence_public, attested=ear is not None)
    receipt = _receipt(bundle, token, evidence_public, attested=ear is not None)
    _check_receipt(receipt, manifest=manifest, token=token, head=head)
    _check_attested(receipt, bundle=bundle, signed=signed, ear=ear)
    countersignature = _countersignature(bundle, broker, head, countersigned_head)
    chain = Chain(
        delegation=delegation,
        manifest=manifest,
        token=token,
        token_sha256=sha256(bundle.token.encode()),
        claims=signed.evidence.claims if signed else None,
        evidence=signed.evidence if signed else None,
        hardware=bundle.hardware,
        ear=ear,
        head=head,
        countersigned_head=countersigned_head,
        receipt=receipt,
        countersignature=countersignature,
        missing=_missing(bundle, signed, ear),
    )
    _check_validity(chain, broker)
    return chain


def _missing(bundle: Bundle, signed: SignedEvidence | None, ear: Ear | None) -> tuple[str, ...]:
    parts = {
        "manifest": bundle.manifest,
        "evidence": bundle.evidence,
        "ear": bundle.ear,
        "head_countersignature": bundle.head if bundle.head_is_countersigned else None,
        "countersignature": bundle.countersignature,
    }
    lacking = [name for name, part in parts.items() if part is None]
    if signed is not None and signed.evidence.hardware and _lacks(bundle.hardware, ear):
        lacking.append("hardware")
    return tuple(lacking)


def _lacks(hardware: HardwareParts | None, ear: Ear | None) -> bool:
    """Return whether something lacks with which an appraisal is repeated; without a result there was none."""
    if hardware is None or ear is None:
        return hardware is None
    return hardware.policy is None or (hardware.collateral is None and ear.collateral_sha256 is not None)


def _check_owner(bundle: Bundle, owner: bytes) -> None:
    """Step 2: another owner's bundle, however sound in itself, is refused with a code of its own."""
    signers = [[name for name, _ in part.signatures] for part in (bundle.delegation, bundle.manifest) if part]
    if all(names != [key_id(owner)] for names in signers):
        raise VerificationError(
            Code.OWNER_UNKNOWN,
            "a bundle by another owner than expected",
            hint="verify it with the owner.pub of the owner who made it, obtained from them",
        )


def _token(bundle: Bundle, broker: bytes, manifest: Manifest | None) -> TokenClaims:
    """Step 5."""
    with _link(Code.CHAIN_TOKEN):
        token = parse_token_at_issue(bundle.token, broker_public=broker)
    if manifest:
        for what, holds in (
            ("manifest hash", token.manifest_sha256 == manifest.sha256),
            ("package", token.package_id == manifest.package_id),
            ("policy floor", token.floor_sha256 == manifest.floor.sha256),
        ):
            _same(Code.CHAIN_TOKEN, f"the token's {what}", holds)
    return token


def _evidence(bundle: Bundle, token: TokenClaims) -> SignedEvidence | None:
    """Step 6."""
    message = bundle.evidence_bytes
    if message is None:
        return None
    with _link(Code.CHAIN_EVIDENCE):
        opened = genuine.check_1_envelope(message)
        genuine.check_4_signatures(
            opened.envelope, evidence_public=opened.evidence_public, launch_public=token.launch_public
        )
        signed = genuine.check_1_payload(opened)
        genuine.check_9_composite(signed.evidence)
        check_12_kinds(signed.evidence)
    claims = signed.evidence.claims
    listed = [(named.size, named.sha256) for named in signed.evidence.hardware]
    for what, holds in (
        ("token", claims.token == bundle.token),
        ("run", claims.run_id == token.run_id),
        ("deployment", claims.deployment == token.deployment),
        ("container", claims.container_id == token.container_id and claims.container_source is token.container_source),
        ("package", claims.package_id == token.package_id),
        ("manifest", claims.manifest_sha256 == token.manifest_sha256),
        ("state", claims.state is State.MEASURED),
        ("hardening report", consistent(claims.hardening)),
        ("hardware", bundle.hardware is None or bundle.hardware.named == listed),
    ):
        _same(Code.CHAIN_EVIDENCE, f"the evidence's {what}", holds)
    return signed


def _ear(
    bundle: Bundle, broker: bytes, manifest: Manifest | None, token: TokenClaims, signed: SignedEvidence | None
) -> Ear | None:
    """Step 7; validity is judged later, at the countersigning time."""
    if bundle.ear is None:
        return None
    if signed is None or manifest is None:
        raise VerificationError(Code.CHAIN_EAR, "an attestation result without the evidence or package that it is of")
    claims = signed.evidence.claims
    with _link(Code.CHAIN_EAR):
        issued = jwt.parse(bundle.ear).claims.get("iat")
        issued_us = issued * 1_000_000 if isinstance(issued, int) else -1
        ear = Ear.parse_token(
            bundle.ear, broker_public=broker, evidence_public=claims.evidence_public, now_us=max(issued_us, 0)
        )
    for what, holds in (
        ("nonce", ear.nonce == claims.nonce),
        ("evidence digest", ear.evidence_sha256 == signed.sha256),
        ("run", ear.run_id == token.run_id),
        ("deployment", ear.deployment == token.deployment),
        ("manifest", ear.manifest_sha256 == token.manifest_sha256),
        ("policy floor", ear.floor_sha256 == token.floor_sha256),
        ("deployment policy", ear.policy_sha256 == token.policy_sha256),
        ("leg of a line", _begins(ear.line) == token.line),
        ("assurance", ear.assurance is claims.assurance and ear.assurance.at_least(manifest.floor.assurance)),
        (
            "hardening profile",
            ear.profile is claims.hardening.profile and ear.profile.at_least(manifest.floor.profile),
        ),
    ):
        _same(Code.CHAIN_EAR, f"the attestation result's {what}", holds)
    return ear


def _head(
    bundle: Bundle, broker: bytes, token: TokenClaims, evidence_public: bytes, *, attested: bool
) -> tuple[Head, CountersignedHead | None]:
    """Step 8."""
    countersigned: CountersignedHead | None = None
    with _link(Code.CHAIN_HEAD):
        if bundle.head_is_countersigned:
            if not attested:
                raise FormatError(Code.SCHEMA, "a countersigned head of a run whose key was never attested")
            countersigned = CountersignedHead.from_envelope(
                bundle.head, broker_public=broker, evidence_public=evidence_public
            )
        head = countersigned.head if countersigned else Head.from_envelope(bundle.head, evidence_public)
    _same(Code.CHAIN_HEAD, "the head's run", head.run_id == token.run_id)
    _same(Code.CHAIN_HEAD, "a final head whose state is not zeroized", head.state is State.ZEROIZED)
    return head, countersigned


def _receipt(bundle: Bundle, token: TokenClaims, evidence_public: bytes, *, attested: bool) -> Receipt:
    """Step 9, signatures."""
    with _link(Code.CHAIN_RECEIPT):
        return Receipt.from_envelope(
            bundle.receipt,
            evidence_public=evidence_public,
            launch_public=None if attested else token.launch_public,
        )


def _begins(leg: LineStart | None) -> LineStart | None:
    """Return which leg of which line it is, and where it begins, as a launch token has it."""
    names = ("id", "leg", "seq", "checkpoint", "rewind", "counted")
    return None if leg is None else LineStart(**{name: getattr(leg, name) for name in names})


def _check_receipt(receipt: Receipt, *, manifest: Manifest | None, token: TokenClaims, head: Head) -> None:
    """Step 9, against head, token and manifest."""
    for what, holds in (
        ("log", (receipt.log_root, receipt.log_size) == (head.root, head.size)),
        ("run", receipt.run_id == token.run_id),
        ("deployment", receipt.deployment == token.deployment),
        ("package", receipt.package_id == token.package_id),
        ("manifest", receipt.manifest_sha256 == token.manifest_sha256),
        ("policy floor", receipt.floor_sha256 == token.floor_sha256),
        ("deployment policy", receipt.policy_sha256 == token.policy_sha256),
        ("workload", manifest is None or receipt.workload == manifest.workload),
        ("leg of a line", _begins(receipt.line) == (None if receipt.ear_sha256 is None else token.line)),
    ):
        _same(Code.CHAIN_RECEIPT, f"the receipt's {what}", holds)


def _check_attested(receipt: Receipt, *, bundle: Bundle, signed: SignedEvidence | None, ear: Ear | None) -> None:
    """Step 9, against evidence and EAR."""
    ear_sha256 = sha256(bundle.ear.encode()) if bundle.ear is not None else None
    _same(Code.CHAIN_RECEIPT, "the receipt's attestation result", receipt.ear_sha256 == ear_sha256)
    _same(Code.CHAIN_RECEIPT, "the receipt's assurance", receipt.assurance is (ear.assurance if ear else None))
    if signed is None:
        _same(Code.CHAIN_RECEIPT, "the receipt's evidence", receipt.evidence_sha256 is None)
        return
    claims = signed.evidence.claims
    for what, holds in (
        ("evidence", receipt.evidence_sha256 == signed.sha256),
        ("measurement", receipt.measurement == claims.measurement_sha256),
        ("environment", receipt.environment_sha256 == claims.environment_sha256),
        ("hardening profile", receipt.profile is claims.hardening.profile),
        ("workspace", receipt.workspace == claims.hardening.workspace.value),
        ("secret memory", receipt.secret_memory == claims.hardening.secret_memory.value),
        ("start", receipt.started_us == claims.started_us),
    ):
        _same(Code.CHAIN_RECEIPT, f"the receipt's {what}", holds)


def _countersignature(
    bundle: Bundle, broker: bytes, head: Head, countersigned_head: CountersignedHead | None
) -> CountersignedReceipt | None:
    """Step 10."""
    if bundle.countersignature is None:
        return None
    with _link(Code.CHAIN_COUNTERSIGNATURE):
        found = CountersignedReceipt.from_envelope(bundle.countersignature, broker)
    for what, holds in (
        ("head", countersigned_head is not None and found.time_us >= countersigned_head.time_us),
        ("run", found.run_id == head.run_id),
        ("receipt", found.receipt_sha256 == sha256(bundle.receipt.encode())),
        ("log", (found.log_root, found.log_size) == (head.root, head.size)),
    ):
        _same(Code.CHAIN_COUNTERSIGNATURE, f"the countersignature's {what}", holds)
    return found


def _check_validity(chain: Chain, broker: bytes) -> None:
    """Step 11: what was valid when the broker countersigned the end of the run."""
    receipt, at_us = chain.receipt, chain.closed_us
    # Without a countersignature there is only the runtime's own clock.
    leeway_us = 0 if chain.countersignature or chain.countersigned_head else CLOCK_LEEWAY_US
    _check_times(chain, at_us)
    for use in sorted(RUN_USES):
        chain.delegation.check(use, broker_public=broker, at_us=at_us, leeway_us=leeway_us)
    if chain.ear:
        if not chain.ear.issued_s <= at_us / 1_000_000 < chain.ear.expires_s:
            raise VerificationError(Code.CHAIN_EAR, "an attestation result that was not valid when the run was closed")
        launched_s, leeway_s = float(chain.ear.issued_s), 0.0
    else:
        launched_s, leeway_s = receipt.started_us / 1_000_000, CLOCK_LEEWAY_US / 1_000_000
    if not chain.token.issued_s - leeway_s <= launched_s < chain.token.expires_s + leeway_s:
        raise VerificationError(Code.CHAIN_TOKEN, "a launch token that was not valid when the run started")


def _check_times(chain: Chain, at_us: int) -> None:
    """Refuse an order of times that no run can have; two clocks may be ten minutes apart."""
    receipt, token_us = chain.receipt, chain.token.issued_s * 1_000_000
    released_us = token_us if chain.ear is None else chain.ear.issued_s * 1_000_000
    for what, holds in (
        ("end, later than it was countersigned,", receipt.finished_us <= at_us + CLOCK_LEEWAY_US),
        ("start, earlier than its launch token,", receipt.started_us >= token_us - CLOCK_LEEWAY_US),
        ("end, earlier than the key was released,", receipt.finished_us >= released_us - CLOCK_LEEWAY_US),
        ("countersignature, earlier than the key was released,", at_us >= released_us - CLOCK_LEEWAY_US),
    ):
        _same(Code.CHAIN_RECEIPT, f"the receipt's {what}", holds)
