"""On dstack a measured launcher names the compose file before it hands over; what an application writes is nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised, EarStatus
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.dstack import dstack_evidence
from glasshouse.attestation.roots.dstack.dstack_events import DstackEvent
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code, FormatError
from glasshouse.runtime.roots.dstack import blob_of
from simulators.dstack_agent import COMPOSE_HASH, KEY_PROVIDER, answer, launched
from simulators.tdx_machine import EVALUATION, FMSPC, TdxMachine

NOW = datetime(2026, 11, 1, tzinfo=UTC)
BOUND = Bound(composite=bytes(range(32)))


@pytest.fixture
def machine() -> TdxMachine:
    return TdxMachine(now=NOW)


def policy(machine: TdxMachine, **changed: Any) -> HardwarePolicy:
    terms = {
        "chain": "workload",
        "compose_hashes": [COMPOSE_HASH.hex()],
        "fmspcs": [FMSPC],
        "images": [machine.registers.image()],
        "key_providers": [KEY_PROVIDER],
        "tcb_evaluation": EVALUATION,
    }
    return HardwarePolicy.from_json({"dstack": {**terms, **changed}})


def blob(machine: TdxMachine, events: Sequence[DstackEvent]) -> bytes:
    return blob_of(json.dumps(answer(machine, events, BOUND.report_data)).encode())


def appraise(
    machine: TdxMachine, evidence: bytes, *, bound: Bound = BOUND, terms: HardwarePolicy | None = None
) -> Appraised:
    return dstack_evidence.appraise_blob(
        evidence,
        bound.report_data,
        now_us=int(NOW.timestamp()) * 1_000_000,
        collateral=machine.pack(),
        policy=terms or policy(machine),
        root_sha256=machine.root_sha256,
    )


@contextlib.contextmanager
def refused(code: Code) -> Any:
    with pytest.raises(CheckFailedError) as raised:
        yield
    assert (raised.value.code, raised.value.check) == (code, "12"), raised.value


@pytest.mark.parametrize("version", [1, 2])
def test_a_launched_compose_file_is_accepted(machine: TdxMachine, version: int) -> None:
    found = appraise(machine, blob(machine, launched(version)))
    assert found.status is EarStatus.AFFIRMING
    assert found.claims["compose_hash"] == COMPOSE_HASH.hex()


def test_an_application_may_write_events_which_count_for_nothing(machine: TdxMachine) -> None:
    written = [*launched(), DstackEvent(name="my-own", payload=b"anything", version=1)]
    assert appraise(machine, blob(machine, written)).status is EarStatus.AFFIRMING


@pytest.mark.parametrize("name", ["compose-hash", "boot-mr-done", "key-provider", "system-ready", "app-id"])
def test_an_application_writes_no_event_of_the_launchers(machine: TdxMachine, name: str) -> None:
    """As the listed compose file's would be written by another one that was launched, or after it."""
    forged = DstackEvent(name=name, payload=COMPOSE_HASH, version=1)
    with refused(Code.DSTACK_EVENT):
        appraise(machine, blob(machine, [*launched(), forged]))
    with refused(Code.DSTACK_EVENT):
        appraise(machine, blob(machine, [forged, *launched()]))


@pytest.mark.parametrize("left_out", ["compose-hash", "boot-mr-done", "key-provider", "system-ready", "instance-id"])
def test_an_event_that_is_not_there_is_no_yes(machine: TdxMachine, left_out: str) -> None:
    events = [event for event in launched() if event.name != left_out]
    with refused(Code.DSTACK_EVENT):
        appraise(machine, blob(machine, events))


def test_a_compose_file_named_behind_the_marker_is_none(machine: TdxMachine) -> None:
    events = launched()
    compose = next(event for event in events if event.name == "compose-hash")
    events.remove(compose)
    events.insert(5, compose)
    assert events[3].name == "boot-mr-done"
    with refused(Code.DSTACK_EVENT):
        appraise(machine, blob(machine, events))


def test_another_compose_file_or_key_provider_is_refused(machine: TdxMachine) -> None:
    evidence = blob(machine, launched())
    with refused(Code.REFERENCE_VALUE):
        appraise(machine, evidence, terms=policy(machine, compose_hashes=["00" * 32]))
    with refused(Code.REFERENCE_VALUE):
        appraise(machine, evidence, terms=policy(machine, key_providers=['{"name":"none","id":""}']))


def test_events_that_the_register_is_not_of(machine: TdxMachine) -> None:
    """A host's word for them: another payload, version or order, one more, one less, or a name that runs on."""
    events = launched()
    good = json.loads(blob(machine, events))
    others = [events[::-1], events[:-1], [*events, events[-1]], [replace(events[1], version=2), *events[1:]]]
    others.append([replace(one, payload=bytes(32)) if one.name == "compose-hash" else one for one in events])
    for other in others:
        forged = blob(machine, other)  # only its events are taken
        with refused(Code.DSTACK_EVENT):
            appraise(machine, _with(good, events=json.loads(forged)["events"]))
    with refused(Code.HARDWARE_MALFORMED):
        appraise(machine, _with(good, events=[{"name": "app-id:x", "payload": "", "version": 1}]))


def _with(read: dict[str, Any], **changed: Any) -> bytes:
    return json.dumps({**read, **changed}, separators=(",", ":"), sort_keys=True).encode()


def test_the_hosts_own_claim_of_the_compose_file_has_to_be_true(machine: TdxMachine) -> None:
    machine.registers.mrconfigid = (b"\x01" + COMPOSE_HASH).ljust(48, b"\x00")
    assert appraise(machine, blob(machine, launched())).status is EarStatus.AFFIRMING
    machine.registers.mrconfigid = (b"\x01" + bytes(32)).ljust(48, b"\x01")
    with refused(Code.REFERENCE_VALUE):
        appraise(machine, blob(machine, launched()))


def test_a_development_image_has_other_registers(machine: TdxMachine) -> None:
    terms = policy(machine)
    machine.registers.rtmr2 = b"\xde" * 48
    with refused(Code.REFERENCE_VALUE):
        appraise(machine, blob(machine, launched()), terms=terms)


def test_another_runs_or_another_root_is_of_no_use(machine: TdxMachine) -> None:
    evidence = blob(machine, launched())
    with refused(Code.HARDWARE_BINDING):
        appraise(machine, evidence, bound=Bound(composite=bytes(32)))
    with refused(Code.HARDWARE_CERTIFICATE):
        dstack_evidence.appraise(
            evidence,
            bound=BOUND,
            now_us=int(NOW.timestamp()) * 1_000_000,
            collateral=machine.pack(),
            policy=policy(machine),
        )


def test_no_other_form_of_a_blob_is_accepted(machine: TdxMachine) -> None:
    whole, pack, terms = blob(machine, launched()), machine.pack(), policy(machine)
    machine.pack = lambda **_: pack  # type: ignore[method-assign]  # made once
    others = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 19)]
    others += [whole[:at] for at in range(1, len(whole), 307)]
    for other in (*others, whole + b"\n", whole + b"\x00"):
        with pytest.raises(CheckFailedError):
            appraise(machine, other, terms=terms)


def test_a_policy_names_its_chain(machine: TdxMachine) -> None:
    terms = policy(machine).to_json()["dstack"]
    assert isinstance(terms, dict)
    with pytest.raises(FormatError) as raised:
        HardwarePolicy.from_json({"dstack": {name: one for name, one in terms.items() if name != "chain"}})
    assert raised.value.code is Code.CHAIN_MISSING
    for empty in ("compose_hashes", "key_providers", "images"):
        with pytest.raises(FormatError):
            policy(machine, **{empty: []})
