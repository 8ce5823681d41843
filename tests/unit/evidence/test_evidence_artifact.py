"""The public artifact: a closed schema, and a last look for what must stay private."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementProto

from glasshouse.attestation.claims import SecretMemoryKind, WorkspaceKind
from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.artifact import (
    NUMBERS,
    OTHER,
    PUBLIC_STOP_REASONS,
    SECRET_MEMORIES,
    VOCABULARY,
    WORKSPACES,
    Artifact,
    PublicOutput,
    known,
)
from glasshouse.evidence.canary import check_canaries
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import LIFECYCLE, PROBES
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey, Suite, salted
from glasshouse.wire.policy import Assurance, Profile

OWNER = SigningKey(b"o" * 32)
CANARY = "Erika Mustermann, born 1964"
SECRET = bytes(range(200, 232))

SHOWN = (b"\x0a" * 32, b"\x0b" * 32)  # salt and digest of weights that their owner reveals

ARTIFACT = Artifact(
    bundle_sha256=b"\x01" * 32,
    assurance=Assurance.SOFTWARE,
    profile=Profile.STRICT,
    suite=Suite.AES_256_GCM,
    workload="lora",
    egress_peers=0,
    gpus=1,
    manifest_sha256=b"\x02" * 32,
    floor_sha256=b"\x03" * 32,
    policy_sha256=b"\x04" * 32,
    measurement=b"\x05" * 32,
    environment_sha256=b"\x06" * 32,
    log_root=b"\x07" * 32,
    log_size=100,
    segments=3,
    unit="step",
    done=30,
    elapsed_us=12_000_000,
    stop_reason="steps",
    loss=("2.5", "0.125"),
    trainable=270_336,
    workspace="tmpfs-noswap",
    secret_memory="memfd-secret",
    outputs=(
        PublicOutput(
            kind="output",
            of="weights",
            plain_bytes=10,
            sealed_sha256=b"\x08" * 32,
            plain_hmac=salted(*SHOWN),
        ).reveal(SHOWN),
        PublicOutput(kind="checkpoint", of="file", plain_bytes=10, sealed_sha256=b"\x09" * 32, plain_hmac=None),
    ),
    zeroization=tuple(
        (name, ProbeResult.UNVERIFIABLE if name == "swap" else ProbeResult.CLEAN) for name in PROBES[:-1]
    ),
    lifecycle_us=dict.fromkeys(LIFECYCLE, 1000),
    training_imports_us=None,
    started_us=1_790_000_000_000_000,
    finished_us=1_790_000_013_000_000,
    countersigned_us=1_790_000_013_100_000,
    numbers={"accuracy": "0.95", "overhead-percent": "-0.1"},
)


ARTIFACT_OUTPUTS: Any = ARTIFACT.to_json()["predicate"]["outputs"]  # type: ignore[call-overload, index]


def with_predicate(**changes: Any) -> Any:
    """The statement with some of its predicate changed."""
    statement: Any = ARTIFACT.to_json()
    return {**statement, "predicate": {**statement["predicate"], **changes}}


def look(document: object, canary: bytes | str) -> None:
    check_canaries(encode(document), [canary], vocabulary=VOCABULARY, max_bytes=1 << 20)


def is_found(document: object, canary: bytes | str) -> bool:
    try:
        look(document, canary)
    except VerificationError as error:
        return error.code is Code.ARTIFACT_CANARY and str(canary) not in str(error)
    return False


def test_it_survives_its_round_trip_and_its_signature() -> None:
    assert Artifact.parse_signed(ARTIFACT.sign(OWNER).encode(), OWNER.public) == ARTIFACT
    with pytest.raises(FormatError):
        Artifact.parse_signed(ARTIFACT.sign(OWNER).encode(), SigningKey(b"x" * 32).public)


def test_every_word_in_it_is_known_beforehand() -> None:
    allowed = set("0123456789abcdef.-")

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                assert key in VOCABULARY
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, str):
            assert value in VOCABULARY or set(value) <= allowed
        else:
            assert value is None or isinstance(value, int)

    walk(ARTIFACT.to_json())


def test_its_vocabulary_is_that_of_the_rooms_it_speaks_of() -> None:
    assert {kind.value for kind in WorkspaceKind} | {OTHER} == set(WORKSPACES)
    assert {kind.value for kind in SecretMemoryKind} | {OTHER} == set(SECRET_MEMORIES)


def test_the_specification_lists_the_same_words() -> None:
    text = (Path(__file__).resolve().parents[3] / "spec" / "evidence.md").read_text()
    for name, words in (
        ("stop_reason", PUBLIC_STOP_REASONS),
        ("workspace", WORKSPACES),
        ("secret_memory", SECRET_MEMORIES),
        ("probe", PROBES),
    ):
        assert f"| `{name}` | " + ", ".join(f"`{word}`" for word in words) + " |" in text
    assert all(f"`{name}`" in text for name in NUMBERS)


def test_a_word_that_it_does_not_know_becomes_other() -> None:
    assert known("tmpfs", WORKSPACES) == "tmpfs"
    assert known("erika-mustermann", WORKSPACES) == OTHER


def text_fields() -> list[str]:
    """Every place of the schema that holds a string, as a path of keys."""
    found: list[str] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and value:
            walk(value[0], f"{path}.0")
        elif isinstance(value, str):
            found.append(path)

    walk(ARTIFACT.to_json(), "")
    return found


@pytest.mark.parametrize("path", text_fields())
def test_no_text_fits_into_any_of_its_fields(path: str) -> None:
    document = json.loads(encode(ARTIFACT.to_json()))
    place: Any = document
    *way, last = path.split(".")
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    for text in (CANARY, "erika-mustermann", "", "0" * 65, place[last].upper() + " "):
        place[last] = text
        with pytest.raises(FormatError):
            Artifact.from_json(document)


def test_no_field_can_be_added_and_none_left_out() -> None:
    statement: Any = ARTIFACT.to_json()
    places: list[tuple[Any, Callable[[Any], Any]]] = [
        (statement, lambda document: document),
        (statement["predicate"], lambda document: {**statement, "predicate": document}),
        (statement["predicate"]["outputs"][0], lambda one: with_predicate(outputs=[one, *ARTIFACT_OUTPUTS[1:]])),
    ]
    for document, whole in places:
        assert Artifact.from_json(whole(document)) == ARTIFACT
        with pytest.raises(FormatError):
            Artifact.from_json(whole({**document, "note": "hello"}))
        for name in document:
            with pytest.raises(FormatError):
                Artifact.from_json(whole({key: value for key, value in document.items() if key != name}))
    assert len(statement["predicate"]) >= len(fields(Artifact)) - 6


@pytest.mark.parametrize("value", ["1e5", "nan", "0.1234567", "1234567890123", "+1", "01", ".5", "1.", "٣"])
def test_a_number_is_a_short_decimal(value: str) -> None:
    with pytest.raises(FormatError):
        Artifact.from_json(with_predicate(numbers=[{"name": "accuracy", "value": value}]))


def test_numbers_are_named_once_and_in_order() -> None:
    one, two = ({"name": name, "value": "1"} for name in NUMBERS[:2])
    for wrong in ([one, one], [two, one], [{"name": "erika", "value": "1"}]):
        with pytest.raises(FormatError):
            Artifact.from_json(with_predicate(numbers=wrong))


@pytest.mark.parametrize(
    ("output", "changes"),
    [
        (0, {"plaintext_salt": "00" * 32}),
        (0, {"plaintext_sha256": "00" * 32}),
        (0, {"plaintext_salt": None}),
        (0, {"plaintext_hmac_sha256": None}),
        (0, {"plaintext_hmac_sha256": None, "plaintext_salt": None, "plaintext_sha256": None}),
        (1, {"plaintext_hmac_sha256": "00" * 32}),
        (1, {"plaintext_hmac_sha256": "00" * 32, "plaintext_salt": "00" * 32, "plaintext_sha256": "00" * 32}),
    ],
)
def test_a_revealed_digest_is_the_one_that_the_runtime_committed_to(output: int, changes: dict[str, Any]) -> None:
    outputs = [dict(one) for one in ARTIFACT_OUTPUTS]
    outputs[output] |= changes
    with pytest.raises(FormatError):
        Artifact.from_json(with_predicate(outputs=outputs))


def test_its_subjects_are_what_it_tells_of_and_nothing_else() -> None:
    hidden = tuple(one.reveal(None) for one in ARTIFACT.outputs)
    for artifact, names in (
        (ARTIFACT, ["weights/0000"]),
        (replace(ARTIFACT, outputs=hidden), ["outputs/0000.sealed", "outputs/0001.sealed"]),
        (replace(ARTIFACT, outputs=()), ["manifest"]),
    ):
        statement: Any = artifact.to_json()
        assert [one["name"] for one in statement["subject"]] == names
        assert Artifact.from_json(statement) == artifact
        for other in ([], statement["subject"] * 2, [{"digest": {"sha256": "00" * 32}, "name": names[0]}]):
            with pytest.raises(FormatError):
                Artifact.from_json({**statement, "subject": other})


def test_tools_of_in_toto_take_it_for_a_statement() -> None:
    statement = Statement.copy_from_pb(json_format.ParseDict(ARTIFACT.to_json(), StatementProto()))
    statement.validate()
    assert statement.pb.subject[0].digest["sha256"] == SHOWN[1].hex()


@pytest.mark.parametrize(
    "changes",
    [
        {"finished_us": 1_789_999_999_999_999},
        {"zeroization": []},
        {"zeroization": [{"probe": "swap", "result": "clean"}]},
        {"zeroization": [{"probe": name, "result": "found" if name == "swap" else "clean"} for name in PROBES]},
        {"zeroization": [{"probe": name, "result": "clean"} for name in (*PROBES, "swap")]},
        {"zeroization": [{"probe": name, "result": "clean"} for name in (*PROBES, "other")]},
        {"countersigned_us": 1_789_999_000_000_000},
    ],
)
def test_what_no_completed_run_can_have_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Artifact.from_json(with_predicate(**changes))


SPELLINGS: dict[str, Callable[[bytes], str]] = {
    "raw": lambda data: data.decode("utf-8"),
    "hex": lambda data: data.hex(),
    "HEX": lambda data: data.hex().upper(),
    "base64": lambda data: base64.b64encode(data).decode(),
    "base64 one byte later": lambda data: base64.b64encode(b"x" + data + b"yz").decode(),
    "base64 two bytes later": lambda data: base64.b64encode(b"xy" + data + b"z").decode(),
    "base64 without padding": lambda data: base64.b64encode(data).decode().rstrip("="),
    "base64url": lambda data: base64.urlsafe_b64encode(data).decode(),
    "base64url later": lambda data: base64.urlsafe_b64encode(b"??" + data).decode(),
    "percent": lambda data: "".join(f"%{byte:02X}" for byte in data),
    "percent, lower": lambda data: "".join(f"%{byte:02x}" for byte in data),
    "quoted": lambda data: urllib.parse.quote(data, safe="/"),
    "reversed": lambda data: data.decode()[::-1],
    "reversed hex": lambda data: data[::-1].hex(),
    "hex reversed": lambda data: data.hex()[::-1],
    "base64 of reversed": lambda data: base64.b64encode(data[::-1]).decode(),
    "base64 reversed": lambda data: base64.b64encode(data).decode()[::-1],
    "upper case": lambda data: data.decode().upper(),
    "json escapes": lambda data: "".join(f"\\u{ord(char):04X}" for char in data.decode()),
    "json": lambda data: json.dumps(data.decode())[1:-1],
    "utf-16 in hex": lambda data: data.decode().encode("utf-16-le").hex(),
    "utf-16-be in hex": lambda data: data.decode().encode("utf-16-be").hex(),
    "nul between": lambda data: "\0".join(["", *data.decode(), ""]),
    "base32": lambda data: base64.b32encode(data).decode(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("canary", [CANARY, "/home/erika/köln.csv", "gpu-host-17.example"])
def test_a_planted_canary_is_found_in_every_spelling(spelling: str, canary: str) -> None:
    planted = f"before {SPELLINGS[spelling](canary.encode())} after"
    assert is_found({"work": {"unit": planted}}, canary)
    assert is_found([1, {planted: None}], canary)


@pytest.mark.parametrize(
    "spelling", ["hex", "HEX", "base64", "base64 one byte later", "base64 two bytes later", "base64url", "percent"]
)
def test_a_planted_key_is_found_in_every_spelling(spelling: str) -> None:
    assert is_found({"value": "1" + SPELLINGS[spelling](SECRET) + "1"}, SECRET)


def test_a_key_in_the_place_of_a_digest_is_found() -> None:
    assert is_found(with_predicate(measurement=SECRET.hex()), SECRET)
    assert not is_found(ARTIFACT.to_json(), SECRET)


def test_digits_that_spell_a_canary_are_found() -> None:
    assert is_found(with_predicate(finished_us=4_915_112_345_678), "4915112345678")


def test_a_machine_called_like_a_word_of_the_schema_is_no_false_alarm() -> None:
    for name in ("root", "software", "lora", "standard", "training_imports_us"):
        assert not is_found(ARTIFACT.to_json(), name)
    assert is_found({"value": "software-host"}, "software")


def test_a_short_name_is_compared_with_whole_values() -> None:
    assert is_found({"value": "erika"}, "Erika")
    assert is_found({"value": b"erika".hex()}, "erika")
    assert not is_found(ARTIFACT.to_json(), "0101")


def test_a_name_of_two_letters_is_no_count() -> None:
    assert not any(is_found({"value": count}, "vm") for count in range(1000))
    for form in ("VM", "mv", "dm0", "766d", "%76%6d"):
        assert is_found({"value": form}, "vm")


@pytest.mark.parametrize("canaries", [[], [""], [b"", "long enough"]])
def test_looking_for_nothing_is_not_a_look(canaries: list[bytes | str]) -> None:
    with pytest.raises(VerificationError) as caught:
        check_canaries(b"{}", canaries, vocabulary=VOCABULARY, max_bytes=100)
    assert caught.value.code is Code.ARTIFACT_CANARY
