"""What the owner may ask of the broker, and what the broker does not do even for its owner."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.client.owner_client import OwnerClient, request
from glasshouse.broker.http_api import LaunchRequest
from glasshouse.broker.store.broker_state import open_broker
from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, RefusedError, UsageError
from glasshouse.handshake.delegation import RUN_USES, Delegation, Use
from glasshouse.tamper.stage import Owner, clock_us
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Assurance, Profile
from simulators.local_broker import LocalBroker


@pytest.fixture
def owner(broker: LocalBroker) -> Owner:
    return Owner(broker)


def policy(owner: Owner, **changes: object) -> DeploymentPolicy:
    made = DeploymentPolicy(
        assurance=Assurance.SOFTWARE,
        profile=Profile.STRICT,
        egress=(),
        references=References.of(owner.measurement),
        release_budget=1,
        not_after_us=clock_us() + 10**9,
        lease_s=60,
        max_duration_s=60,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def delegation(broker_public: bytes, **changes: object) -> Delegation:
    made = Delegation(
        broker_public=broker_public,
        uses=RUN_USES,
        not_before_us=0,
        not_after_us=clock_us() + 10**9,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def launch(owner: Owner, **changes: object) -> str:
    about: dict[str, object] = {
        "deployment": owner.deployment,
        "run_id": secrets.token_hex(16),
        "container_id": "c",
        "container_source": ContainerSource.MINTED,
        "launch_public": SigningKey.generate().public,
        "lifetime_s": 60,
    }
    return owner.client().add_launch(LaunchRequest(**{**about, **changes}))  # type: ignore[arg-type]


def code_of(error: pytest.ExceptionInfo[GlasshouseError]) -> Code:
    return error.value.code


def test_a_deployment_may_tighten_the_floor_and_never_loosen_it(owner: Owner) -> None:
    envelope = owner.manifest.sign(owner.signing)
    assert owner.client().add_deployment(envelope, owner.package_key, policy(owner)) != owner.deployment
    for loosened in (policy(owner, profile=Profile.STANDARD), policy(owner, egress=("hub.example:443",))):
        with pytest.raises(RefusedError) as caught:
            owner.client().add_deployment(envelope, owner.package_key, loosened)
        assert code_of(caught) is Code.POLICY_LOOSENED


def test_a_key_that_is_not_the_packages_is_refused_when_it_is_handed_over(owner: Owner) -> None:
    with pytest.raises(FormatError) as caught:
        owner.client().add_deployment(owner.manifest.sign(owner.signing), bytes(32), policy(owner))
    assert code_of(caught) is Code.KEY_COMMITMENT


def test_a_package_id_stands_for_one_manifest(owner: Owner) -> None:
    other = replace(owner.manifest, index_sha256=bytes(32)).sign(owner.signing)
    with pytest.raises(UsageError, match="another manifest"):
        owner.client().add_deployment(other, owner.package_key, policy(owner))


def test_a_manifest_that_its_owner_did_not_sign_is_refused(owner: Owner) -> None:
    stranger = SigningKey.generate()
    renamed = replace(owner.manifest, owner_signing=stranger.public).sign(stranger)
    forged = renamed.replace(stranger.key_id.encode(), owner.signing.key_id.encode())
    with pytest.raises(FormatError):
        owner.client().add_deployment(forged, owner.package_key, policy(owner))


def test_a_deployment_that_is_over_is_not_begun(owner: Owner) -> None:
    with pytest.raises(UsageError) as caught:
        owner.client().add_deployment(
            owner.manifest.sign(owner.signing), owner.package_key, policy(owner, not_after_us=1)
        )
    assert code_of(caught) is Code.POLICY_IMPOSSIBLE


def test_a_revoked_package_is_neither_deployed_nor_launched(owner: Owner) -> None:
    package_id = owner.manifest.package_id
    revoked = owner.client().revoke(package_id)
    assert owner.client().revoke(package_id) == revoked, "once is enough"
    with pytest.raises(RefusedError) as caught:
        launch(owner)
    assert code_of(caught) is Code.PACKAGE_REVOKED
    with pytest.raises(RefusedError) as caught:
        owner.client().add_deployment(owner.manifest.sign(owner.signing), owner.package_key, policy(owner))
    assert code_of(caught) is Code.PACKAGE_REVOKED
    with pytest.raises(UsageError):
        owner.client().revoke("0" * 32)


def test_a_launch_needs_a_deployment_a_delegation_and_a_run_of_its_own(broker: LocalBroker, owner: Owner) -> None:
    with pytest.raises(UsageError) as caught:
        launch(owner, deployment="0" * 32)
    assert code_of(caught) is Code.DEPLOYMENT_UNKNOWN
    run_id = secrets.token_hex(16)
    launch(owner, run_id=run_id)
    with pytest.raises(UsageError, match="launched before"):
        launch(owner, run_id=run_id)
    only_countersign = delegation(broker.broker_public, uses=frozenset({Use.COUNTERSIGN})).sign(owner.signing)
    owner.client().put_delegation(only_countersign, owner.signing.public)
    with pytest.raises(UsageError) as caught:
        launch(owner)
    assert code_of(caught) is Code.CHAIN_DELEGATION


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "short"},
        {"container_id": "no spaces allowed"},
        {"container_source": "guessed"},
        {"launch_public": b"short"},
        {"lifetime_s": 0},
        {"lifetime_s": 10**9},
    ],
)
def test_a_launch_that_is_not_one_is_refused(owner: Owner, changes: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        launch(owner, **changes)


def test_a_delegation_to_another_broker_an_old_one_or_a_forged_one_is_refused(
    broker: LocalBroker, owner: Owner
) -> None:
    key, stranger = owner.signing, SigningKey.generate()
    for wrong in (delegation(stranger.public), delegation(broker.broker_public, not_after_us=clock_us() - 1)):
        with pytest.raises(UsageError) as caught:
            owner.client().put_delegation(wrong.sign(key), key.public)
        assert code_of(caught) is Code.CHAIN_DELEGATION
    with pytest.raises(FormatError):
        owner.client().put_delegation(delegation(broker.broker_public).sign(stranger), key.public)
    owner.client().put_delegation(delegation(broker.broker_public).sign(key), key.public)


def test_one_owners_delegation_does_not_stand_for_another_owner(broker: LocalBroker, owner: Owner) -> None:
    other = Owner(broker)
    stranger = SigningKey.generate()
    owner.client().put_delegation(delegation(broker.broker_public).sign(stranger), stranger.public)
    assert launch(owner)
    assert launch(other)
    assert broker.count("delegations") == 3


def test_what_does_not_exist_is_said_not_to(owner: Owner) -> None:
    with pytest.raises(UsageError) as caught:
        owner.client().deployment("0" * 32)
    assert code_of(caught) is Code.DEPLOYMENT_UNKNOWN
    with pytest.raises(UsageError) as caught:
        owner.client().run("0" * 32)
    assert code_of(caught) is Code.RUN_UNKNOWN


@pytest.mark.parametrize("query", ["?after=-1", "?after=x", "?after=1&after=2", "?before=1", "?after=" + "9" * 16])
def test_the_audit_log_is_asked_for_by_number(owner: Owner, query: str) -> None:
    reply = request(owner.client()._url, "GET", f"/v1/audit{query}")
    assert reply.problem().code is Code.USAGE


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": 1}', encode({"manifest": {}, "package_key": "x", "policy": {}})])
def test_requests_that_are_none_are_refused(owner: Owner, body: bytes) -> None:
    for method, path in (("POST", "/v1/deployments"), ("POST", "/v1/launches"), ("PUT", "/v1/delegation")):
        assert request(owner.client()._url, method, path, body).status == 400


def test_a_broker_that_is_away_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    away = OwnerClient(tmp_path / "nobody")
    with pytest.raises(PeerError) as caught:
        away.wait_ready(0.05)
    assert code_of(caught) is Code.BROKER_UNREACHABLE
    assert caught.value.hint


def test_a_broker_keeps_its_key_and_refuses_without_its_key_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = open_broker(data)
    first.database.close()
    again = open_broker(data)
    assert again.key.public == first.key.public
    again.database.close()
    key_file = data / "broker.key"
    content = key_file.read_bytes()
    key_file.unlink()
    with pytest.raises(UsageError) as caught:
        open_broker(data)
    assert code_of(caught) is Code.FILE_MISSING
    assert not key_file.exists(), "a new key file could not open the old secrets"
    other = open_broker(tmp_path / "other")
    other.database.close()
    key_file.touch(mode=0o600)
    key_file.write_bytes((tmp_path / "other" / "broker.key").read_bytes())
    with pytest.raises(UsageError, match="does not open"):
        open_broker(data)
    key_file.write_bytes(content)
    open_broker(data).database.close()
    data.chmod(0o755)
    with pytest.raises(UsageError, match="0755"):
        open_broker(data)


def test_an_older_delegation_takes_the_place_of_no_newer_one(broker: LocalBroker, owner: Owner) -> None:
    given = Delegation.from_envelope(owner.delegation, owner.signing.public)

    def put(serial_us: int, **changes: Any) -> int:
        signed = replace(given, serial_us=serial_us, **changes).sign(owner.signing)
        return owner.client().put_delegation(signed, owner.signing.public)

    def uses() -> frozenset[Use]:
        [(kept,)] = broker.rows("SELECT envelope FROM delegations")
        assert isinstance(kept, bytes)
        return Delegation.parse_signed(kept, owner.signing.public).uses

    narrow = frozenset({Use.COUNTERSIGN})
    assert put(2000, uses=narrow) == 2000
    records = broker.count("audit")
    # The broader one of before, signed by the same owner: with a smaller serial, without one, with the same.
    for older in (1999, 0, 2000):
        assert put(older) == 2000
        assert uses() == narrow
        with pytest.raises(UsageError) as caught:
            owner.launch()
        assert caught.value.code is Code.CHAIN_DELEGATION
    assert broker.count("audit") == records, "what changed nothing is not told as if it had"
    assert put(2001) == 2001
    assert uses() == RUN_USES
    owner.launch()
    # What somebody put beneath the broker, which its owner did not sign, keeps out nothing.
    forged = replace(given, serial_us=10**15).sign(SigningKey.generate())
    broker.edit("UPDATE delegations SET envelope = ?", forged.encode())
    assert put(2002) == 2002
