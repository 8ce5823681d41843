"""The vectors of spec/owner-api.md: requests that a gate takes, and one for each thing that it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.decide.hardware.packs import CollateralRequests
from glasshouse.broker.store.broker_state import open_broker
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.stored import StoredPart
from glasshouse.handshake.owner_api import SignedPolicy, authenticate, check_body, check_serial
from glasshouse.wire.crypto import key_id

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "owner-api"
KEYS = json.loads((FOLDER / "keys.json").read_bytes())
ALL = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json")) if path.name != "keys.json"}
CASES = {name: case for name, case in ALL.items() if not name.startswith(("collateral", "policy", "store"))}
COLLATERAL = {name: case for name, case in ALL.items() if name.startswith("collateral")}
STORED = {name: case for name, case in ALL.items() if name.startswith("store")}
POLICIES = {name: case for name, case in ALL.items() if name.startswith("policy")}
if len(CASES) < 25 or len(COLLATERAL) < 10 or len(POLICIES) < 6 or len(STORED) < 20:
    raise RuntimeError(f"only {len(ALL)} vectors in {FOLDER}")


def take(given: dict[str, Any]) -> bytes:
    """Make checks 1 to 7, and return whose request it is."""
    owners = [bytes.fromhex(one) for one in KEYS["owners"]]
    request = authenticate(
        given["authorization"],
        owners={key_id(owner): owner for owner in owners},
        gate_public=bytes.fromhex(KEYS["gate"]),
        method=given["method"],
        target=given["target"],
        now_us=given["now_us"],
    )
    check_body(request, given["body"].encode())
    check_serial(request, given["last_us"])
    return request.owner


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_taken_or_refused_as_the_vector_says(name: str) -> None:
    expected = CASES[name]["expect"]
    if expected["code"] is None:
        assert take(CASES[name]["input"]).hex() == expected["owner"]
        return
    with pytest.raises(GlasshouseError) as caught:
        take(CASES[name]["input"])
    assert caught.value.code is Code(expected["code"])


def test_what_is_invalid_is_refused_in_one_and_the_same_words() -> None:
    said = set()
    for case in CASES.values():
        if case["expect"]["code"] == Code.OWNER_REQUEST:
            with pytest.raises(GlasshouseError) as caught:
                take(case["input"])
            said.add((caught.value.message, caught.value.hint))
    assert len(said) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_signed_policy_is_read_or_refused_as_the_vector_says(name: str) -> None:
    data, expected = POLICIES[name]["input"]["envelope"].encode(), POLICIES[name]["expect"]
    owner = bytes.fromhex(KEYS["owners"][0])
    if expected["code"] is None:
        signed = SignedPolicy.parse_signed(data, owner)
        assert signed.policy.sha256.hex() == expected["policy_sha256"]
        assert signed.broker_public.hex() == KEYS["gate"]
        return
    with pytest.raises(GlasshouseError) as caught:
        SignedPolicy.parse_signed(data, owner)
    assert caught.value.code is Code(expected["code"])


@pytest.mark.parametrize("name", COLLATERAL)
def test_a_pack_is_kept_or_refused_as_the_vector_says(name: str, tmp_path: Path) -> None:
    body, expected = COLLATERAL[name]["input"]["body"], COLLATERAL[name]["expect"]
    text = body if isinstance(body, str) else body["repeat"] * body["times"]
    broker = open_broker(tmp_path)
    try:
        requests, owner = CollateralRequests(broker, Quota()), Scope(owner=bytes.fromhex(KEYS["owners"][0]))
        if expected["code"] is None:
            answer = json.loads(requests.put_collateral(text.encode(), {}, owner).body)
            assert answer == {"collateral_sha256": expected["collateral_sha256"]}
            return
        with pytest.raises(GlasshouseError) as caught:
            requests.put_collateral(text.encode(), {}, owner)
        assert caught.value.code is Code(expected["code"])
    finally:
        broker.database.close()


@pytest.mark.parametrize("name", STORED)
def test_a_part_of_a_file_is_taken_or_refused_as_the_vector_says(name: str) -> None:
    def check() -> StoredPart:
        body = STORED[name]["input"]["body"].encode()
        part, gate = StoredPart.parse(body), bytes.fromhex(KEYS["gate"])
        assert part.encode() == body
        run_id, signer = part.claimed(gate)
        runtime = bytes.fromhex(KEYS["runtime"])
        assert signer == key_id(runtime)
        part.check(run_id=run_id, broker_public=gate, evidence_public=runtime)
        return part

    expected = STORED[name]["expect"]["code"]
    if expected is None:
        assert check().head
        return
    with pytest.raises(GlasshouseError) as caught:
        check()
    assert caught.value.code is Code(expected)


def test_the_generator_writes_the_same_files_again() -> None:
    spec = importlib.util.spec_from_file_location("generate_owner_api", ROOT / "spec/vectors/generate_owner_api.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.build() == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
