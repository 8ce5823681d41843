"""The documents of spec/checkpoints.md section 4, each signed as it must be, and what is refused of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from package_parts import fixed

from checkpoint_cases.common import (
    BROKER,
    DEPLOYMENT,
    EVIDENCE,
    LINE,
    MANIFEST,
    NOW_US,
    OWNER,
    RUN_ID,
    STORE,
    STRANGER,
    Case,
    case,
)
from checkpoint_cases.parts import header_of
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey

DIGEST, PREVIOUS = fixed("checkpoint 5", 32).hex(), fixed("checkpoint 4", 32).hex()
LEG: dict[str, Any] = {"leg": 2, "line": LINE}
COUNTED = LEG | {"deployment": DEPLOYMENT, "digest": DIGEST, "seq": 5}
ROW = {"bytes": 5000, "head_sha256": "11" * 32, "sha256": "22" * 32}


def sign(kind: str, value: Any, key: SigningKey) -> dsse.Envelope:
    return dsse.sign(f"application/vnd.glasshouse.{kind}+json", encode(value), [key])


# Its name, its signer, what is in it, and what may be left out of it.
DOCUMENTS: tuple[tuple[str, SigningKey, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "checkpoint-part",
        EVIDENCE,
        LEG | {"attempt": 3, "bytes": 5000, "rank": 0, "run_id": RUN_ID, "seq": 5, "sha256": "22" * 32},
        (),
    ),
    ("checkpoint-header", EVIDENCE, header_of(ROW), ("previous",)),
    ("checkpoint-stored", STORE, COUNTED, ()),
    (
        "checkpoint",
        EVIDENCE,
        COUNTED
        | {"previous": PREVIOUS, "run_id": RUN_ID, "step": 120}
        | {"stored": sign("checkpoint-stored", COUNTED, STORE).to_json()},
        ("previous",),
    ),
    (
        "ticket",
        BROKER,
        COUNTED
        | {"counted_us": NOW_US, "holder": EVIDENCE.key_id, "manifest_sha256": MANIFEST, "previous": PREVIOUS}
        | {"run_id": RUN_ID, "step": 120},
        ("previous",),
    ),
    ("checkpoint-read", EVIDENCE, {"line": LINE, "rank": -1, "run_id": RUN_ID, "start": 0}, ()),
    ("resume-order", OWNER, COUNTED | {"leg": 3, "rewind": True, "serial_us": NOW_US}, ("digest", "rewind")),
    ("leg-lost", OWNER, LEG | {"deployment": DEPLOYMENT, "serial_us": NOW_US}, ()),
    (
        "leg-abandoned",
        BROKER,
        COUNTED
        | {"evidence": [EVIDENCE.key_id], "manifest_sha256": MANIFEST, "run_ids": [RUN_ID], "time_us": NOW_US}
        | {"head": sign("head", {}, EVIDENCE).to_json(), "why": "lease"},
        ("digest", "head"),
    ),
)
# A value out of its range, or of another form, of each.
SPOILED: dict[str, tuple[tuple[str, Any], ...]] = {
    "checkpoint-part": (("attempt", 0), ("bytes", 0), ("rank", 1024), ("seq", 0)),
    "checkpoint-header": (("parts", [ROW, ROW]), ("machines", 65)),
    "checkpoint-stored": (("leg", 0), ("seq", 0)),
    "checkpoint": (("stored", None), ("leg", 1_000_001)),
    "ticket": (("holder", "00" * 32), ("previous", None)),
    "checkpoint-read": (("rank", -2), ("start", -1)),
    "resume-order": (("rewind", 1), ("serial_us", 0)),
    "leg-lost": (("line", LINE[:-2]),),
    "leg-abandoned": (("why", "receipt"), ("evidence", ["00"]), ("head", None)),
}


def statement_cases() -> Iterator[Case]:
    for document, key, value, optional in DOCUMENTS:

        def of(name: str, description: str, envelope: dsse.Envelope, code: str | None = None) -> Case:
            given = {"document": document, "envelope": envelope.encode().decode(), "public": key.public.hex()}  # noqa: B023 - used at once
            return case(f"statement--{document}-{name}", description, given, code=code)  # noqa: B023

        yield of("valid", "as it must be", sign(document, value, key))
        if optional:
            least = {name: one for name, one in value.items() if name not in optional}
            yield of("valid-least", "without what may be absent", sign(document, least, key))
        yield of("another-key", "signed by another key", sign(document, value, STRANGER), "signature-invalid")
        unsigned = dsse.Envelope(
            payload_type=f"application/vnd.glasshouse.{document}+json",
            payload=encode(value | {"leg": 9} if "leg" in value else value | {"start": 9}),
            signatures=sign(document, value, key).signatures,
        )
        yield of("changed", "changed after it was signed", unsigned, "signature-invalid")
        yield of("another-type", "signed as another document", sign("receipt", value, key), "wrong-type")
        missing = {name: one for name, one in value.items() if name != "line"}
        yield of("member-missing", "without its line", sign(document, missing, key), "schema-invalid")
        yield of("member-unknown", "a member too many", sign(document, value | {"x": 1}, key), "schema-invalid")
        for member, wrong in SPOILED[document]:
            spoiled = sign(document, value | {member: wrong}, key)
            yield of(f"{member.replace('_', '-')}-wrong", f"{member} of another form", spoiled, "schema-invalid")
