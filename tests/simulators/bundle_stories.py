"""What can be done to a receipt bundle: every link of the chain broken, with the code that names the break.

Told by the tests of `verify` and written down as vectors by spec/vectors/generate_evidence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from glasshouse.attestation.claims import HardeningReport
from glasshouse.attestation.evidence import EVIDENCE_TYPE, Evidence
from glasshouse.errors import Code
from glasshouse.evidence.bundle import COUNTERSIGNED_RECEIPT_TYPE
from glasshouse.evidence.heads import CountersignedHead, Head
from glasshouse.evidence.receipt import RECEIPT_TYPE
from glasshouse.handshake.delegation import Use
from glasshouse.handshake.launch import TokenClaims
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.states import State
from simulators.world import START_US, Run, World, envelope

__all__ = ["SECOND_US", "STORIES", "Story"]

SECOND_US = 1_000_000


@dataclass(frozen=True)
class Story:
    """What an attacker did to one link, and the code that it gets."""

    told: str
    code: Code
    forge: Callable[[World, Run], bytes]


def resigned(run: Run, world: World, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A receipt changed and signed again by the runtime itself, with a broker that would countersign anything."""
    statement: Any = decode(run.bundle.receipt.payload, max_bytes=1 << 20)
    change(statement)
    receipt = dsse.sign(RECEIPT_TYPE, encode(statement), [world.evidence_key])
    return run.with_parts(receipt=receipt, countersignature=closing(world, run, receipt))


def closing(world: World, run: Run, receipt: dsse.Envelope, **changes: Any) -> dsse.Envelope:
    payload = {
        "log_root": run.receipt.log_root.hex(),
        "log_size": run.receipt.log_size,
        "receipt_sha256": sha256(receipt.encode()).hex(),
        "run_id": run.receipt.run_id,
        "time_us": world.now_us,
        "version": 1,
        **changes,
    }
    return dsse.sign(COUNTERSIGNED_RECEIPT_TYPE, encode(payload), [world.broker])


def predicate(**changes: Any) -> Callable[[World, Run], bytes]:
    return lambda world, run: resigned(run, world, lambda statement: statement["predicate"].update(changes))


def other_head(world: World, run: Run, *, key: str = "evidence", broker: str = "broker", **changes: Any) -> bytes:
    head = Head.from_json({**run.heads[-1].head.to_json(), **changes})
    signed = head.sign(world.key(key))
    made = CountersignedHead.sign(head, signed, previous_size=1, time_us=world.now_us, broker_key=world.key(broker))
    return run.with_parts(head=made.envelope)


def other_evidence(world: World, run: Run, **changes: Any) -> bytes:
    evidence = world.evidence(**changes)
    return run.with_parts(evidence=decode(evidence, max_bytes=1 << 20))


def other_ear(world: World, run: Run, **changes: Any) -> bytes:
    """The attestation result of the same broker on other evidence, beside the evidence of this run."""
    return run.with_parts(ear=world.ear(world.evidence(**changes), **changes))


def flipped(part: dsse.Envelope) -> dsse.Envelope:
    name, signature = part.signatures[0]
    return replace(part, signatures=((name, signature[:-1] + bytes([signature[-1] ^ 1])), *part.signatures[1:]))


def inconsistent(report: HardeningReport) -> HardeningReport:
    return replace(report, anti_debug=False)


def strict_floor_run(world: World, _run: Run) -> bytes:
    """A broker that released below the floor which the owner signed."""
    strict = World(floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STRICT))
    return strict.run().data


class LateToken(World):
    """A runtime that says it began an hour before it was launched."""

    def token_claims(self, **changes: object) -> TokenClaims:
        late = {"issued_s": START_US // SECOND_US + 3600, "expires_s": START_US // SECOND_US + 7200}
        return super().token_claims(**{**late, **changes})


def composite_of_others(world: World) -> Any:
    honest = Evidence(claims=world.claims(measurement=bytes(32)), composite=bytes(32), hardware=())
    signed = dsse.sign(EVIDENCE_TYPE, honest.encode(), [world.evidence_key, world.launch_key])
    return signed.to_json()


STORIES = [
    Story("the delegation's signature is damaged", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=flipped(r.bundle.delegation))),
    Story("the broker signs its own delegation", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=dsse.sign(
              r.bundle.delegation.payload_type, r.bundle.delegation.payload, [w.broker]))),
    Story("the owner's signature is moved onto other uses", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=replace(
              w.delegation(uses=frozenset({Use.RELEASE})), signatures=r.bundle.delegation.signatures))),
    Story("a delegation that does not let the broker countersign", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=w.delegation(uses=frozenset({Use.RELEASE})))),
    Story("a delegation that does not let the broker release", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=w.delegation(uses=frozenset({Use.COUNTERSIGN})))),
    Story("a delegation that had ended when the run was closed", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=w.delegation(not_after_us=START_US))),
    Story("a delegation that had not begun", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=w.delegation(not_before_us=START_US + 60 * SECOND_US))),
    Story("the owner's manifest in the place of the delegation", Code.CHAIN_DELEGATION,
          lambda w, r: r.with_parts(delegation=r.bundle.manifest)),
    Story("the manifest's signature is damaged", Code.CHAIN_MANIFEST,
          lambda w, r: r.with_parts(manifest=flipped(r.bundle.manifest))),
    Story("the manifest gets another recipient", Code.CHAIN_MANIFEST,
          lambda w, r: r.with_parts(manifest=replace(
              r.bundle.manifest,
              payload=replace(w.manifest, recipients=(World("thief").owner_hpke.public,)).encode()))),
    Story("the delegation in the place of the manifest", Code.CHAIN_MANIFEST,
          lambda w, r: r.with_parts(manifest=r.bundle.delegation)),
    Story("another package of the same owner", Code.CHAIN_TOKEN,
          lambda w, r: r.with_parts(manifest=envelope(replace(w.manifest, index_bytes=501).sign(w.owner)))),
    Story("the delegation is to another broker", Code.CHAIN_TOKEN,
          lambda w, r: r.with_parts(delegation=w.delegation(broker_public=w.key("other broker").public))),
    Story("the attestation result in the place of the token", Code.CHAIN_TOKEN,
          lambda w, r: r.with_parts(token=r.bundle.ear)),
    Story("the token's signature is damaged", Code.CHAIN_TOKEN,
          lambda w, r: r.with_parts(token=r.bundle.token[:-4] + "AAAA")),
    Story("a token for another floor", Code.CHAIN_TOKEN,
          lambda w, r: r.with_parts(token=w.token(floor_sha256=bytes(32)))),
    Story("a token for another package", Code.CHAIN_TOKEN,
          lambda w, r: r.with_parts(token=w.token(package_id="00" * 16))),
    Story("another launch of the same deployment", Code.CHAIN_EVIDENCE,
          lambda w, r: r.with_parts(token=w.token(run_id="00" * 16))),
    Story("a token for a launch key that did not sign", Code.CHAIN_EVIDENCE,
          lambda w, r: r.with_parts(token=w.token(launch_public=w.key("other").public))),
    Story("evidence of another moment", Code.CHAIN_EAR,
          lambda w, r: other_evidence(w, r, issued_us=START_US + 5)),
    Story("evidence that claims another measurement", Code.CHAIN_EAR,
          lambda w, r: other_evidence(w, r, measurement=bytes(32))),
    Story("evidence for another container", Code.CHAIN_EVIDENCE,
          lambda w, r: other_evidence(w, r, container_id="elsewhere")),
    Story("evidence in another state", Code.CHAIN_EVIDENCE,
          lambda w, r: other_evidence(w, r, state=State.RUNNING)),
    Story("evidence that contradicts its own hardening", Code.CHAIN_EVIDENCE,
          lambda w, r: other_evidence(w, r, hardening=inconsistent(w.hardening()))),
    Story("evidence that claims hardware without showing it", Code.CHAIN_EVIDENCE,
          lambda w, r: other_evidence(w, r, assurance=Assurance.GPU_TEE)),
    Story("evidence with other claims than its composite", Code.CHAIN_EVIDENCE,
          lambda w, r: r.with_parts(evidence=composite_of_others(w))),
    Story("the receipt in the place of the evidence", Code.CHAIN_EVIDENCE,
          lambda w, r: r.with_parts(evidence=r.bundle.receipt.to_json())),
    Story("an attestation result of other evidence", Code.CHAIN_EAR,
          lambda w, r: other_ear(w, r, issued_us=START_US + 5)),
    Story("an attestation result by another broker", Code.CHAIN_EAR,
          lambda w, r: r.with_parts(ear=World("other").ear(w.evidence()))),
    Story("the token in the place of the attestation result", Code.CHAIN_EAR,
          lambda w, r: r.with_parts(ear=r.bundle.token)),
    Story("an attestation result with its evidence left out", Code.CHAIN_EAR,
          lambda w, r: r.with_parts(evidence=None)),
    Story("an attestation result with its package left out", Code.CHAIN_EAR,
          lambda w, r: r.with_parts(manifest=None)),
    Story("a release below the owner's floor", Code.CHAIN_EAR, strict_floor_run),
    Story("a final head by another key", Code.CHAIN_HEAD, lambda w, r: other_head(w, r, key="other")),
    Story("a final head countersigned by another broker", Code.CHAIN_HEAD,
          lambda w, r: other_head(w, r, broker="other broker")),
    Story("a final head of another run", Code.CHAIN_HEAD, lambda w, r: other_head(w, r, run_id="00" * 16)),
    Story("an earlier head in the place of the last", Code.CHAIN_HEAD,
          lambda w, r: r.with_parts(head=r.heads[-2].envelope)),
    Story("a head of another log", Code.CHAIN_RECEIPT, lambda w, r: other_head(w, r, root="00" * 32)),
    Story("a longer head than the receipt's", Code.CHAIN_RECEIPT, lambda w, r: other_head(w, r, size=10**6)),
    Story("the receipt's signature is damaged", Code.CHAIN_RECEIPT,
          lambda w, r: r.with_parts(receipt=flipped(r.bundle.receipt))),
    Story("a receipt that the launch key signed alone", Code.CHAIN_RECEIPT,
          lambda w, r: r.with_parts(receipt=dsse.sign(RECEIPT_TYPE, r.bundle.receipt.payload, [w.launch_key]))),
    Story("a receipt of another run", Code.CHAIN_RECEIPT, predicate(run_id="00" * 16)),
    Story("a receipt of another deployment", Code.CHAIN_RECEIPT, predicate(deployment="00" * 16)),
    Story("a receipt of another package", Code.CHAIN_RECEIPT, predicate(package_id="00" * 16)),
    Story("a receipt of another manifest", Code.CHAIN_RECEIPT, predicate(manifest_sha256="00" * 32)),
    Story("a receipt under another floor", Code.CHAIN_RECEIPT, predicate(floor_sha256="00" * 32)),
    Story("a receipt under another policy", Code.CHAIN_RECEIPT, predicate(policy_sha256="00" * 32)),
    Story("a receipt of another workload", Code.CHAIN_RECEIPT, predicate(workload="mlp")),
    Story("a receipt of other evidence", Code.CHAIN_RECEIPT, predicate(evidence_sha256="00" * 32)),
    Story("a receipt of another attestation result", Code.CHAIN_RECEIPT, predicate(ear_sha256="00" * 32)),
    Story("a receipt whose work stopped for a reason of its own", Code.CHAIN_RECEIPT, predicate(
        work={"done": 5, "elapsed_us": 5000, "stop_reason": "meet-at-noon", "unit": "step"})),
    Story("a receipt whose work stopped as no run does any more", Code.CHAIN_RECEIPT, predicate(
        work={"done": 5, "elapsed_us": 5000, "stop_reason": "paced", "unit": "step"})),
    Story("a receipt with a loss of seven digits", Code.CHAIN_RECEIPT,
          predicate(loss={"final": "0.4000001", "first": "0.8"})),
    Story("a receipt at a higher level", Code.CHAIN_RECEIPT, predicate(assurance="gpu-tee")),
    Story("a receipt of another measurement", Code.CHAIN_RECEIPT, predicate(measurement="00" * 32)),
    Story("a receipt of another environment", Code.CHAIN_RECEIPT, predicate(environment_sha256="00" * 32)),
    Story("a receipt of better hardening", Code.CHAIN_RECEIPT, predicate(
        hardening={"profile": "strict", "secret_memory": "memfd-secret", "workspace": "tmpfs-noswap"})),
    Story("a receipt that started at another time", Code.CHAIN_RECEIPT, predicate(started_us=START_US - 1)),
    Story("a receipt that ended long after it was closed", Code.CHAIN_RECEIPT,
          predicate(finished_us=START_US + 3600 * SECOND_US)),
    Story("a receipt of another log", Code.CHAIN_RECEIPT, predicate(log={"root": "00" * 32, "size": 3})),
    Story("a completed receipt that found something", Code.CHAIN_RECEIPT,
          predicate(zeroization=[{"detail": "", "probe": "swap", "result": "found"}])),
    Story("a receipt whose probe is of an unknown name", Code.CHAIN_RECEIPT, predicate(
        zeroization=[{"detail": "", "probe": "everything", "result": "clean"}])),
    Story("a completed receipt that searched one place only", Code.CHAIN_RECEIPT, predicate(
        zeroization=[{"detail": "", "probe": "swap", "result": "clean"}])),
    Story("a receipt of a run that began before its launch", Code.CHAIN_RECEIPT, lambda _w, _r: LateToken().run().data),
    Story("a receipt without a probe", Code.CHAIN_RECEIPT, predicate(zeroization=[])),
    Story("a receipt that does not say what it leaves out", Code.CHAIN_RECEIPT, predicate(not_covered=[])),
    Story("a receipt with an unknown field", Code.CHAIN_RECEIPT, predicate(note="fine")),
    Story("a receipt with a lost outcome", Code.CHAIN_RECEIPT, predicate(outcome="lost", code="lease-lost")),
    Story("a receipt that names another evidence key", Code.CHAIN_RECEIPT, predicate(evidence_public="A" * 43)),
    Story("another receipt under the same countersignature", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(receipt=envelope(replace(r.receipt, segments=7).sign(w.evidence_key)))),
    Story("the countersignature is by another broker", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(countersignature=dsse.sign(
              COUNTERSIGNED_RECEIPT_TYPE,
              r.bundle.countersignature.payload,
              [w.key("other broker")]))),
    Story("the runtime countersigns itself", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(countersignature=dsse.sign(
              COUNTERSIGNED_RECEIPT_TYPE,
              r.bundle.countersignature.payload,
              [w.evidence_key]))),
    Story("the countersigned head in the place of the countersignature", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(countersignature=r.bundle.head)),
    Story("a countersignature of another run", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(countersignature=closing(w, r, r.bundle.receipt, run_id="00" * 16))),
    Story("a countersignature of another log", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(countersignature=closing(w, r, r.bundle.receipt, log_root="00" * 32))),
    Story("a countersignature from before the end", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(countersignature=closing(w, r, r.bundle.receipt, time_us=START_US))),
    Story("a countersignature over a head that is not", Code.CHAIN_COUNTERSIGNATURE,
          lambda w, r: r.with_parts(head=envelope(r.final_head))),
    Story("a run closed after its attestation result had expired", Code.CHAIN_EAR,
          lambda w, r: r.with_parts(
              delegation=w.delegation(not_after_us=START_US + 10**12),
              countersignature=closing(w, r, r.bundle.receipt, time_us=START_US + 20_000 * SECOND_US))),
]  # fmt: skip
