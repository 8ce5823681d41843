"""Two owners at one gate, over TLS: what one has there does not exist for the other, whatever is asked."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import OwnerClient, Reply
from glasshouse.errors import Code, GlasshouseError, PeerError, RefusedError, UsageError, VerificationError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import LaunchFile, parse_token
from glasshouse.handshake.owner_api import SignedPolicy
from glasshouse.jobs.supervise.launching import mint
from glasshouse.package.layout import key_commitment
from glasshouse.tamper.stage import Actor, Owner, clock_us
from glasshouse.wire.canonical import Json, b64encode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.statements import LegLost
from glasshouse.wire.states import State
from simulators.gate_store import ALICE, MALLORY, AtGate
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter, release_to

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def alice(gate: LocalBroker) -> Owner:
    return Owner(AtGate(gate, ALICE), signing=ALICE, releases=3)


@pytest.fixture
def mallory(gate: LocalBroker) -> Owner:
    return Owner(AtGate(gate, MALLORY), signing=MALLORY, releases=3)


def launch_body(deployment: str, **more: Json) -> dict[str, Json]:
    return {
        "container": {"id": "c", "source": "minted"},
        "deployment": deployment,
        "launch_public": b64encode(SigningKey.generate().public),
        "lifetime_s": 60,
        "run_id": secrets.token_hex(16),
        **more,
    }


def ask(owner: Owner, method: str, path: str, value: dict[str, Json] | None = None) -> Reply:
    client = owner.client()
    assert isinstance(client, GateClient)
    return client._send(method, path, None if value is None else encode(value))


def test_an_owner_does_at_the_gate_what_owners_do(alice: Owner) -> None:
    actor = Actor.enter(alice)
    assert release_to(actor) == alice.package_key
    assert alice.client().run(actor.launch.run_id)["releases"] == 1
    assert alice.releases() == 1
    [first, second] = alice.client().add_group(alice.deployment, machines=2, ranks=1)
    assert alice.launch(group=first).claims().group == first
    assert alice.client().group(second.id)["launched"] == 1


def keeps_checkpoints(owner: Owner) -> None:
    """Name a store in an owner's delegation, as launches of lines need."""
    delegation = Delegation.from_envelope(owner.delegation, owner.signing.public)
    more = replace(delegation, uses=frozenset(Use), store_public=bytes(32), serial_us=clock_us())
    owner.client().put_delegation(more.sign(owner.signing), owner.signing.public)


def line_of(gate: LocalBroker, owner: Owner) -> bytes:
    """Launch the first leg of a line, and return the line's id."""
    keeps_checkpoints(owner)
    reply = ask(owner, "POST", "/v1/launches", launch_body(owner.deployment, line={"leg": 1, "seq": 0}))
    claims = parse_token(json.loads(reply.content())["token"], broker_public=gate.broker_public, now_us=clock_us())
    assert claims.line is not None
    return claims.line.id


def leg_lost(ids: dict[str, str]) -> LegLost:
    return LegLost(deployment=ids["deployment"], leg=1, line=bytes.fromhex(ids["line"]), serial_us=1)


# Each call of the owner API, tried on an id: what is asked, by (method, path, body).
Asked = tuple[str, str, dict[str, Json] | None]
CALLS: dict[str, Callable[[dict[str, str], Owner], Asked]] = {
    "GET /v1/deployments/ID": lambda ids, _: ("GET", f"/v1/deployments/{ids['deployment']}", None),
    "GET /v1/runs/ID": lambda ids, _: ("GET", f"/v1/runs/{ids['run']}", None),
    "GET /v1/runs/ID/stored": lambda ids, _: ("GET", f"/v1/runs/{ids['run']}/stored", None),
    "POST /v1/runs/ID/stored/forget": lambda ids, _: ("POST", f"/v1/runs/{ids['run']}/stored/forget", {}),
    "GET /v1/groups/ID": lambda ids, _: ("GET", f"/v1/groups/{ids['group']}", None),
    "POST /v1/groups/ID/refuse": lambda ids, _: (
        "POST",
        f"/v1/groups/{ids['group']}/refuse",
        {"code": "rank-lost", "machine": 0},
    ),
    "GET /v1/lines/ID": lambda ids, _: ("GET", f"/v1/lines/{ids['line']}", None),
    "POST /v1/lines/ID/lost": lambda ids, me: (
        "POST",
        f"/v1/lines/{ids['line']}/lost",
        {"lost": leg_lost(ids).sign(me.signing).to_json()},
    ),
    "POST /v1/launches of a line": lambda ids, me: (
        "POST",
        "/v1/launches",
        launch_body(me.deployment, line={"id": ids["line"], "leg": 1, "seq": 0}),
    ),
    "POST /v1/packages/ID/revoke": lambda ids, _: (
        "POST",
        f"/v1/packages/{ids['package']}/revoke",
        {"running": True},
    ),
    "POST /v1/launches": lambda ids, _: ("POST", "/v1/launches", launch_body(ids["deployment"])),
    "POST /v1/launches in a group": lambda ids, me: (
        "POST",
        "/v1/launches",
        launch_body(me.deployment, group={"id": ids["group"], "machine": 1, "machines": 2, "ranks": 1}),
    ),
    "POST /v1/groups": lambda ids, _: (
        "POST",
        "/v1/groups",
        {"deployment": ids["deployment"], "machines": 2, "ranks": 1},
    ),
}
# These name no id: they carry what its owner signed, or name the owner (`test_broker_hardware.py` tries that one).
SIGNED = {"PUT /v1/delegation", "POST /v1/deployments", "POST /v1/collateral"}


def test_every_call_of_the_page_is_tried() -> None:
    page = (ROOT / "spec" / "owner-api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `((?:GET|PUT|POST) /v1/[A-Za-z/]+)` \|", page, flags=re.MULTILINE))
    assert named == {re.split(" in | of ", name)[0] for name in CALLS} | SIGNED


@pytest.mark.parametrize("name", CALLS)
def test_another_owners_id_is_answered_as_one_that_does_not_exist(
    gate: LocalBroker, alice: Owner, mallory: Owner, name: str
) -> None:
    actor = Actor.enter(alice)
    release_to(actor)
    group = alice.client().add_group(alice.deployment, machines=2, ranks=1)[0]
    theirs = {
        "deployment": alice.deployment,
        "run": actor.launch.run_id,
        "group": group.id.hex(),
        "package": alice.manifest.package_id,
        "line": line_of(gate, alice).hex(),
    }
    keeps_checkpoints(mallory)
    nobodys = {name: secrets.token_hex(len(value) // 2) for name, value in theirs.items()}
    before = {table: rows for table, rows in gate.everything().items() if table != "owners"}
    replies = [ask(mallory, *CALLS[name](ids, mallory)) for ids in (theirs, nobodys)]
    assert replies[0] == replies[1]
    assert replies[0].status == 404
    assert {table: rows for table, rows in gate.everything().items() if table != "owners"} == before


def test_what_another_owner_signed_is_not_taken_from_one_who_recorded_it(
    gate: LocalBroker, alice: Owner, mallory: Owner
) -> None:
    before = gate.count("deployments")
    given: dict[str, Json] = {"delegation": alice.delegation.to_json(), "owner": b64encode(ALICE.public)}
    assert ask(mallory, "PUT", "/v1/delegation", given).problem().code is Code.CHAIN_DELEGATION
    envelope = Envelope.parse(alice.manifest.sign(ALICE), max_bytes=1 << 20).to_json()
    deployment: dict[str, Json] = {
        "manifest": envelope,
        "package_key": b64encode(alice.package_key),
        "policy": {},
    }
    assert ask(mallory, "POST", "/v1/deployments", deployment).status != 200
    assert gate.count("deployments") == before


def test_two_owners_may_have_packages_of_one_id_and_neither_learns_of_it(alice: Owner, mallory: Owner) -> None:
    taken = alice.manifest.package_id
    manifest = replace(mallory.manifest, package_id=taken, key_commitment=key_commitment(mallory.package_key, taken))
    policy = policy_of(mallory)
    mallory.client().add_deployment(manifest.sign(MALLORY), mallory.package_key, policy)
    mallory.client().revoke(taken, running=True)
    actor = Actor.enter(alice)
    assert release_to(actor) == alice.package_key
    with pytest.raises(RefusedError) as caught:
        mallory.client().add_deployment(manifest.sign(MALLORY), mallory.package_key, policy)
    assert caught.value.code is Code.PACKAGE_REVOKED


def policy_of(owner: Owner) -> DeploymentPolicy:
    floor = owner.manifest.floor
    return DeploymentPolicy(
        assurance=floor.assurance,
        profile=floor.profile,
        egress=floor.egress,
        references=References.of(owner.measurement),
        release_budget=1,
        not_after_us=clock_us() + 10**9,
        lease_s=60,
        max_duration_s=60,
    )


def test_an_edited_database_releases_nothing_by_a_policy_that_its_owner_did_not_sign(
    gate: LocalBroker, alice: Owner
) -> None:
    looser = replace(policy_of(alice), release_budget=1000)
    actor = Actor.enter(alice)
    [(signed,)] = gate.rows("SELECT policy FROM deployments")
    assert isinstance(signed, bytes)
    forged = SignedPolicy(broker_public=gate.broker_public, manifest_sha256=alice.manifest.sha256, policy=looser).sign(
        MALLORY
    )
    # Nor by the very policy that its owner signed, when they signed it for another gate.
    elsewhere = SignedPolicy.parse_signed(bytes(signed), ALICE.public)
    elsewhere = replace(elsewhere, broker_public=SigningKey.generate().public)
    for edited in (looser.encode(), forged.encode(), elsewhere.sign(ALICE).encode()):
        gate.edit("UPDATE deployments SET policy = ?", edited)
        with pytest.raises(GlasshouseError):
            actor.challenge()
    # Nor as if it had come by the socket, where policies are not signed: the wrapped key is bound to its owner's row.
    plain = alice.manifest.package_id
    gate.edit("PRAGMA foreign_keys = OFF")
    gate.edit("UPDATE packages SET package_id = ?", plain)
    gate.edit("UPDATE deployments SET package_id = ?, policy = ?", plain, looser.encode())
    with pytest.raises(RefusedError):
        actor.challenge()  # its token is for the policy that was signed
    later = Actor.enter(alice)
    assert later.send(later.sign(later.claims(later.challenge()))).status == 500
    assert gate.count("releases") == 0


@dataclass(frozen=True)
class Preparing:
    """A gate, as a run's preparation asks it."""

    owner: Owner
    public: bytes
    runtime_url: str
    owner_socket: None = None

    def client(self) -> OwnerClient:
        return self.owner.client()


def test_a_looser_policy_that_was_moved_to_another_deployment_launches_nothing(gate: LocalBroker, alice: Owner) -> None:
    strict = policy_of(alice)
    looser = replace(strict, release_budget=1000)
    envelope = alice.manifest.sign(ALICE)
    moved, meant = (alice.client().add_deployment(envelope, alice.package_key, policy) for policy in (looser, strict))
    asked = Preparing(alice, gate.broker_public, gate.runtime_url)

    def minted(run_id: str) -> bytes:
        how = {"broker_url": gate.runtime_url, "place": "here"}
        return mint(asked, alice.manifest, meant, strict, run_id, alice.delegation, None, **how).launch

    assert LaunchFile.parse(minted(secrets.token_hex(16))).broker_public == gate.broker_public
    gate.edit(
        "UPDATE deployments SET policy = (SELECT policy FROM deployments WHERE id = ?) WHERE id = ?", moved, meant
    )
    with pytest.raises(PeerError) as caught:
        minted(secrets.token_hex(16))
    assert caught.value.code is Code.BROKER_PROTOCOL
    assert "policy_sha256" in caught.value.message


def test_a_package_whose_runs_are_revoked_has_no_head_countersigned_and_keeps_what_it_has(alice: Owner) -> None:
    actor = Actor.enter(alice)
    release_to(actor)
    reporter = Reporter(actor)
    reporter.go_on(State.HARDENED, State.MEASURED)
    assert reporter.send(reporter.submission()).status == 200
    alice.client().revoke(alice.manifest.package_id)
    reporter.go_on(State.ATTESTED)
    assert reporter.send(reporter.submission()).status == 200, "what has the key keeps it"
    said = alice.client().revoke(alice.manifest.package_id, running=True)
    assert said["running"] is True
    assert alice.client().revoke(alice.manifest.package_id, running=True) == said
    reporter.go_on(State.RELEASED)
    assert reporter.send(reporter.submission()).problem().code is Code.PACKAGE_REVOKED
    with pytest.raises(RefusedError):
        alice.launch()


def test_an_owners_audit_log_shows_what_concerns_them_and_nothing_of_others(
    gate: LocalBroker, alice: Owner, mallory: Owner
) -> None:
    release_to(Actor.enter(alice))
    group = alice.client().add_group(alice.deployment, machines=2, ranks=1)[0]
    alice.client().refuse_group(group.id, machine=0, code=Code.RANK_LOST)
    told, last = gate.gate(ALICE).own_audit()
    events = [record["event"] for record in told if isinstance(record, dict)]
    assert events == ["delegation", "deployment", "launch", "challenge", "release", "group", "group-refusal"]
    assert last[0] == len(events)
    others, _ = gate.gate(MALLORY).own_audit()
    assert [record["event"] for record in others if isinstance(record, dict)] == ["delegation", "deployment"]
    assert alice.deployment not in str(others)
    assert len(gate.client().audit()) == len(told) + len(others), "the broker's own user sees all of it"


def test_a_log_that_was_edited_or_put_back_is_noticed_by_who_kept_its_head(
    gate: LocalBroker, alice: Owner, mallory: Owner
) -> None:
    client = gate.gate(ALICE)
    alice.client().revoke(alice.manifest.package_id)
    _, kept = client.own_audit()
    _, kept = client.own_audit(kept=kept)
    # The gate forgets the revocation, and makes a chain that holds: its signature is good, and it is another log.
    gate.edit("DELETE FROM own_audit WHERE owner = ? AND sequence = ?", ALICE.public, kept[0])
    client.own_audit()
    with pytest.raises(VerificationError) as caught:
        client.own_audit(kept=kept)
    assert caught.value.code is Code.LOG_INVALID
    # A record that was changed does not lead to any head.
    changed = "CAST(replace(record, 'delegation', 'relegation') AS BLOB)"
    gate.edit(f"UPDATE own_audit SET record = {changed} WHERE owner = ?", ALICE.public)
    with pytest.raises(VerificationError):
        client.own_audit()
    # Another owner's log is another.
    with pytest.raises(VerificationError):
        gate.gate(MALLORY).own_audit(kept=kept)


def test_an_owner_who_is_not_enrolled_any_more_is_nobody(tmp_path: Path) -> None:
    with LocalBroker(tmp_path, owners=(ALICE.public,)) as running:
        deployment = Owner(AtGate(running, ALICE), signing=ALICE).deployment
    with LocalBroker(tmp_path, owners=(MALLORY.public,)) as running:
        with pytest.raises(RefusedError) as caught:
            running.gate(ALICE).deployment(deployment)
        assert caught.value.code is Code.OWNER_REQUEST
        assert running.client().deployment(deployment)["deployment"] == deployment, "the broker's own user sees it"
        with pytest.raises(UsageError):
            running.gate(MALLORY).deployment(deployment)
