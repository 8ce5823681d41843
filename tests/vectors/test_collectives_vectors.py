"""The vectors of spec/sealed-collectives.md, read as data; and derived once more from the words of the spec alone."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from glasshouse.collectives.engine.failure import REASONS, Alert
from glasshouse.collectives.protocol.group_keys import ALL, Lane, Membership, Schedule, hello_key, next_key
from glasshouse.collectives.protocol.headers import HEADER_BYTES, FrameHeader, FrameKind, payload_bytes
from glasshouse.collectives.protocol.rendezvous import ConnectionHandshake, Rendezvous
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.collectives.transport.local_link import INLINE, parse_unit
from glasshouse.collectives.transport.send_pool import PAGE_BYTES
from glasshouse.errors import Code, CollectiveError, GlasshouseError
from glasshouse.wire import ranks
from glasshouse.wire.crypto import Suite
from glasshouse.wire.frames import Decoder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "sealed-collectives"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if len(CASES) < 90:
    raise FileNotFoundError(f"only {len(CASES)} vectors in {FOLDER}")


def membership(given: dict[str, Any], rank: int = 0) -> Membership:
    return Membership(
        group=given["group"], ranks=tuple(given["ranks"]), rank=rank, incarnation=int(given["incarnation"])
    )


def the_schedule(given: dict[str, Any], rank: int) -> Schedule:
    parts = [bytes.fromhex(part) for part in given["contributions"]]
    return Schedule(membership(given, rank), bytes.fromhex(given["secret"]), parts)


def schedule(given: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, list[str]] = {}
    confirmations: dict[str, str] = {}
    size = len(given["ranks"])
    for source in range(size):
        own = the_schedule(given, source)
        for lane in Lane:
            for destination in {*range(size), ALL} - {source} - ({ALL} if lane is Lane.P2P else set()):
                place = f"{lane.name.lower()} {source}>{'all' if destination == ALL else destination}"
                if destination != ALL:
                    confirmations[place] = own.confirmation(lane, source, destination).hex()
                    peer = the_schedule(given, destination)
                    assert peer.confirms(lane, source, bytes.fromhex(confirmations[place]))
                for suite in Suite:
                    key = own.traffic_key(suite, lane, source, destination)
                    keys[f"{suite.value} {place}"] = [key.hex(), next_key(key, suite).hex()]
    return {
        "code": None,
        "confirmations": confirmations,
        "hello_key": hello_key(bytes.fromhex(given["secret"])).hex(),
        "keys": keys,
        "membership_digest": membership(given).digest().hex(),
        "transcript": the_schedule(given, 0).transcript.hex(),
    }


def hello(given: dict[str, Any]) -> dict[str, Any]:
    rank = given["rank"]
    meeting = Rendezvous(
        membership(given, rank),
        bytes.fromhex(given["secret"]),
        contribution=bytes.fromhex(given["contributions"][rank]),
    )
    for before in given["before"]:
        ConnectionHandshake(meeting).receive(bytes.fromhex(before))
    lane = None if given["lane"] is None else Lane(given["lane"])
    found = meeting.meet(bytes.fromhex(given["hello"]), lane=lane, peer=given["peer"])
    return {"code": None, "contribution": found.contribution.hex(), "lane": int(found.lane), "source": found.source}


def confirmation(given: dict[str, Any]) -> dict[str, Any]:
    own = the_schedule(given, given["rank"])
    good = own.confirms(Lane(given["lane"]), given["source"], bytes.fromhex(given["confirmation"]))
    return {"code": None if good else Code.COLLECTIVE_TAMPERED.value}


def opened_frames(given: dict[str, Any]) -> dict[str, Any]:
    """Read the frames of one connection in the order in which they came."""
    lane, source = Lane(given["lane"]), given["source"]
    traffic = Traffic(the_schedule(given, given["rank"]), rekey_after=given["rekey_after"])
    opened: list[str] = []
    try:
        for frame in map(bytes.fromhex, given["frames"]):
            header, sealed = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
            opener = traffic.route(lane, source, header)
            out = bytearray(payload_bytes(header))
            try:
                opener.open_into(header, sealed, out)
            except CollectiveError:
                assert not any(out)
                raise
            FrameHeader.parse(header)
            opened.append(out.hex())
    except CollectiveError as error:
        return {"code": error.code.value, "opened": opened}
    return {"code": None, "opened": opened}


def alert(given: dict[str, Any]) -> dict[str, Any]:
    found = Alert.parse(bytes.fromhex(given["payload"]))
    assert found.encode().hex() == given["payload"]
    return {
        "code": None,
        "culprit": found.culprit,
        "detected_by": found.detected_by,
        "operation": None if found.operation is None else str(found.operation),
        "reason": found.reason.value,
        "text": found.text,
    }


def hand_over(given: dict[str, Any]) -> dict[str, Any]:
    asked = ranks.ask_secret(given["token"])
    ((_, answer),) = Decoder().feed(bytes.fromhex(given["answer"]))
    try:
        secret = ranks.read_secret(answer)  # type: ignore[arg-type]
    except GlasshouseError as error:
        return {"asked": asked.hex(), "code": error.code.value}
    return {"asked": asked.hex(), "code": None, "secret": secret.hex()}


def unit(given: dict[str, Any]) -> dict[str, Any]:
    place, size = parse_unit(bytes.fromhex(given["unit"]), given["arena_bytes"], 1)
    return {"code": None, "place": None if place == INLINE else place * PAGE_BYTES, "size": size}


KINDS = {
    "alert": alert,
    "confirmation": confirmation,
    "unit": unit,
    "frames": opened_frames,
    "hand-over": hand_over,
    "hello": hello,
    "schedule": schedule,
}


@pytest.mark.parametrize("name", CASES)
def test_vector(name: str) -> None:
    case = CASES[name]
    try:
        found = KINDS[case["kind"]](case["input"])
    except GlasshouseError as error:
        found = {"code": error.code.value}
    assert found == case["expect"]


def test_every_kind_has_vectors_that_pass_and_vectors_that_fail() -> None:
    for kind in set(KINDS) - {"schedule"}:
        assert {case["expect"]["code"] is None for case in CASES.values() if case["kind"] == kind} == {True, False}
    assert {case["expect"]["reason"] for case in CASES.values() if "reason" in case["expect"]} == {*REASONS}


def test_every_kind_of_frame_and_every_field_of_its_header_has_a_vector() -> None:
    good = [
        case["input"]["frames"] for case in CASES.values() if case["kind"] == "frames" and not case["expect"]["code"]
    ]
    assert {bytes.fromhex(frame)[1] for frames in good for frame in frames} == set(FrameKind)
    assert len([name for name in CASES if name.startswith("frame-flip-")]) == 17 + 2


def lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def hkdf(key: bytes, *info: bytes) -> bytes:
    """RFC 5869 with SHA-256, no salt and 32 bytes of output, by hand."""
    extracted = hmac.digest(bytes(32), key, "sha256")
    return hmac.digest(extracted, lp(*info) + b"\x01", "sha256")


LABEL = b"glasshouse collectives v1 "


def by_hand(given: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """Membership digest, transcript and group key, from the words of section 4."""
    global_ranks = b"".join(rank.to_bytes(4, "big") for rank in given["ranks"])
    digest = hashlib.sha256(lp(LABEL + b"membership", given["group"].encode(), global_ranks)).digest()
    contributions = b"".join(bytes.fromhex(part) for part in given["contributions"])
    size, incarnation = len(given["ranks"]).to_bytes(4, "big"), int(given["incarnation"]).to_bytes(8, "big")
    transcript = hashlib.sha256(lp(LABEL + b"transcript", digest, size, incarnation, contributions)).digest()
    return digest, transcript, hkdf(bytes.fromhex(given["secret"]), LABEL + b"group", transcript)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "schedule"])
def test_the_schedule_follows_from_the_words_of_the_spec(name: str) -> None:
    given, expect = CASES[name]["input"], CASES[name]["expect"]
    digest, transcript, key = by_hand(given)
    assert expect["membership_digest"] == digest.hex()
    assert expect["transcript"] == transcript.hex()
    assert expect["hello_key"] == hkdf(bytes.fromhex(given["secret"]), LABEL + b"hello").hex()
    for place, shown in expect["keys"].items():
        suite, lane, pair = place.split()
        source, destination = pair.split(">")
        where = (
            bytes([{"collective": 1, "p2p": 2}[lane]])
            + int(source).to_bytes(2, "big")
            + (0xFFFF if destination == "all" else int(destination)).to_bytes(2, "big")
        )
        first = hkdf(key, LABEL + b"traffic", suite.encode(), where)
        assert shown == [first.hex(), hkdf(first, LABEL + b"rekey", suite.encode()).hex()]
        if destination != "all":
            confirmed = hmac.digest(hkdf(key, LABEL + b"confirm"), lp(LABEL + b"confirm", transcript, where), "sha256")
            assert expect["confirmations"][f"{lane} {pair}"] == confirmed.hex()


@pytest.mark.parametrize(
    "name", ["frame-data-aes", "frame-data-chacha", "frame-data-for-all", "frame-alert", "frame-bye"]
)
def test_a_frame_opens_by_the_words_of_the_spec(name: str) -> None:
    case = CASES[name]
    _, transcript, key = by_hand(case["input"])
    (frame,) = map(bytes.fromhex, case["input"]["frames"])
    header, sealed = frame[:64], frame[64:]
    suite = {1: "AES-256-GCM", 2: "ChaCha20-Poly1305"}[header[2]]
    traffic_key = hkdf(key, LABEL + b"traffic", suite.encode(), bytes([case["input"]["lane"]]) + header[8:12])
    cipher = AESGCM(traffic_key) if header[2] == 1 else ChaCha20Poly1305(traffic_key)
    opened = cipher.decrypt(bytes(4) + header[16:24], sealed, transcript + header)
    assert [opened.hex()] == case["expect"]["opened"]
    assert int.from_bytes(header[12:16], "big") == len(opened) == len(sealed) - 16


def test_a_hello_is_made_by_the_words_of_the_spec() -> None:
    given = CASES["hello-good"]["input"]
    digest, _, _ = by_hand(given)
    fields = (
        bytes.fromhex("89474843 0d0a1a0a 0001 01 00 0001 0000".replace(" ", ""))
        + len(given["ranks"]).to_bytes(4, "big")
        + bytes(4)
        + int(given["incarnation"]).to_bytes(8, "big")
        + digest
        + bytes.fromhex(given["contributions"][1])
    )
    key = hkdf(bytes.fromhex(given["secret"]), LABEL + b"hello")
    assert given["hello"] == (fields + hmac.digest(key, fields, "sha256")).hex()


def test_the_generator_writes_the_same_files_again() -> None:
    path = ROOT / "spec" / "vectors" / "generate_collectives.py"
    spec = importlib.util.spec_from_file_location("generate_collectives", path)
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.build() == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
