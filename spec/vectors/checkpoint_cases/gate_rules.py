"""The gate's rules of spec/checkpoints.md: sections 5, what counts, and 6, which leg is released."""

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
from checkpoint_cases.statements import COUNTED, DIGEST, PREVIOUS, sign
from glasshouse.wire.crypto import SigningKey

SECOND_US, LEASE_S = 1_000_000, 600
OLDER = SigningKey(fixed("line older evidence", 32))  # of leg 1
OTHER = SigningKey(fixed("line other evidence", 32))  # of leg 2's machine 1
OLDER_RUN, OTHER_RUN = fixed("run id 1", 16).hex(), fixed("run id 2", 16).hex()
FOURTH = {
    "counted_us": NOW_US - 60 * SECOND_US,
    "deployment": DEPLOYMENT,
    "digest": PREVIOUS,
    "holder": OLDER.key_id,
    "leg": 1,
    "line": LINE,
    "manifest_sha256": MANIFEST,
    "previous": fixed("checkpoint 3", 32).hex(),
    "run_id": OLDER_RUN,
    "seq": 4,
    "step": 100,
}
HEAD: dict[str, Any] = {"digest": PREVIOUS, "seq": 4, "step": 100}
RECORD: dict[str, Any] = {
    "deployment": DEPLOYMENT,
    "head": HEAD,
    "holder": EVIDENCE.key_id,
    "id": LINE,
    "leg": 2,
    "lost": False,
    "machines": 2,
    "order_us": NOW_US - 600 * SECOND_US,
    "ranks": 1,
    "since_us": NOW_US - 120 * SECOND_US,
    "ticket": sign("ticket", FOURTH, BROKER).encode().decode(),
}
RELEASED = [
    {"evidence_public": key.public.hex(), "leg": leg, "machine": machine, "run_id": run_id}
    for leg, machine, run_id, key in ((1, 0, OLDER_RUN, OLDER), (2, 0, RUN_ID, EVIDENCE), (2, 1, OTHER_RUN, OTHER))
]
MESSAGE: dict[str, Any] = COUNTED | {"previous": PREVIOUS, "run_id": RUN_ID, "step": 120}


def message(*, key: SigningKey = EVIDENCE, store: SigningKey = STORE, stored: Any = None, **changes: Any) -> str:
    value = {name: one for name, one in (MESSAGE | changes).items() if one is not None}
    said = {name: value[name] for name in COUNTED} | (stored or {})
    value["stored"] = sign("checkpoint-stored", said, store).to_json()
    return sign("checkpoint", value, key).encode().decode()


def _ticket(**changes: Any) -> dict[str, Any]:
    ticket = MESSAGE | {"counted_us": NOW_US, "holder": EVIDENCE.key_id, "manifest_sha256": MANIFEST} | changes
    return {name: one for name, one in ticket.items() if one is not None}


def count_cases() -> Iterator[Case]:
    def of(name: str, description: str, body: str, *, code: str | None = None, ticket: Any = None, **more: Any) -> Case:
        given = {"broker_public": BROKER.public.hex(), "legs": RELEASED, "line": RECORD, "manifest_sha256": MANIFEST}
        given |= {"message": body, "now_us": NOW_US, "store_public": STORE.public.hex()} | more
        return case(f"count--{name}", description, given, code=code, **({} if code else {"ticket": ticket}))

    yield of("next", "the next of the current leg", message(), ticket=_ticket())
    fifth = _ticket(counted_us=NOW_US - 1)
    counted = RECORD | {"ticket": sign("ticket", fifth, BROKER).encode().decode()}
    counted["head"] = {"digest": DIGEST, "seq": 5, "step": 120}
    yield of("repeated", "the answer was lost: the same ticket", message(), ticket=fifth, line=counted)
    beginning = RECORD | {"head": None, "ticket": None}
    first = {"seq": 1, "previous": None}
    yield of("first", "the first of its line", message(**first), ticket=_ticket(**first), line=beginning)
    rewound = RECORD | {"head": {"digest": "33" * 32, "seq": 2, "step": 50}}
    after = {"previous": "33" * 32}
    yield of("after-a-rewind", "a number of its own", message(**after), ticket=_ticket(**after), line=rewound)
    back = NOW_US - 3600 * SECOND_US
    dated = _ticket(counted_us=FOURTH["counted_us"])
    yield of("clock-set-back", "dated no earlier than the last", message(), ticket=dated, now_us=back)
    yield of("another-line", "of another line", message(line="44" * 32), code="run-unknown")
    yield of("another-deployment", "of another deployment", message(deployment="55" * 16), code="run-unknown")
    yield of("stranger", "by a key that no leg was released to", message(key=STRANGER), code="run-unknown")
    yield of("machine-1", "by another machine", message(key=OTHER, run_id=OTHER_RUN), code="line-forked")
    yield of("later-leg", "of a leg that is another's", message(leg=3), code="line-forked")
    known = [one | {"leg": 2} if one["leg"] == 1 else one for one in RELEASED]
    two = {"code": "line-forked", "legs": known}
    yield of("two-holders", "a ticket showed another holder", message(key=OLDER, run_id=OLDER_RUN), **two)
    yield of("not-delegated", "the owner names no store", message(), code="delegation-invalid", store_public=None)
    yield of("another-store", "stated by another store", message(store=STRANGER), code="delegation-invalid")
    another = message(stored={"digest": "66" * 32})
    yield of("stored-another", "another checkpoint is stored", another, code="checkpoint-incomplete")
    old = message(key=OLDER, leg=1, run_id=OLDER_RUN)
    yield of("old-leg", "of a leg after which another was released", old, code="line-superseded")
    for name, changes in (("seq-again", {"seq": 4}), ("seq-skipped", {"seq": 6}), ("no-previous", {"previous": None})):
        yield of(name, "not the next", message(**changes), code="checkpoint-stale")
    changed = message(digest="66" * 32)
    yield of("another-digest", "another of the number that was counted", changed, code="checkpoint-stale", line=counted)
    yield of("too-large", "too large", " " * 8193, code="message-too-large")
    yield of("no-envelope", "no envelope", "{}", code="message-invalid")


def launch_cases() -> Iterator[Case]:
    start: dict[str, Any] = {"checkpoint": PREVIOUS, "id": LINE, "leg": 3, "seq": 4}
    ordered = {"deployment": DEPLOYMENT, "digest": PREVIOUS, "leg": 3, "line": LINE, "seq": 4, "serial_us": NOW_US}
    terms: dict[str, Any] = {
        "contact_us": NOW_US - 30 * SECOND_US,
        "deployment": DEPLOYMENT,
        "lease_s": LEASE_S,
        "machines": 2,
        "max_legs": 3,
        "order": None,
        "owner": OWNER.public.hex(),
        "ranks": 1,
        "receipts": True,
    }

    def of(name: str, description: str, *, code: str | None = None, head: Any = HEAD, **more: Any) -> Case:
        given: dict[str, Any] = {"broker_public": BROKER.public.hex(), "line": RECORD, "now_us": NOW_US}
        given |= {"start": start, "stored_step": None, "terms": terms, "ticket": None} | more
        serial_us = NOW_US if given["terms"]["order"] else given["line"] and given["line"]["order_us"]
        expect = {} if code else {"head": head, "order_us": serial_us}
        return case(f"launch--{name}", description, given, code=code, **expect)

    def order(key: SigningKey = OWNER, **changes: Any) -> dict[str, Any]:
        value = {name: one for name, one in (ordered | changes).items() if one is not None}
        return terms | {"max_legs": 1, "order": sign("resume-order", value, key).encode().decode()}

    silent = {"receipts": False, "contact_us": NOW_US - (LEASE_S + 60) * SECOND_US}
    yield of("next", "each machine of the leg before left a receipt")
    yield of("ordered", "by an order of the owner's", terms=order())
    yield of("lost", "the owner reported the leg before lost", terms=terms | silent, line=RECORD | {"lost": True})
    over = silent | {"contact_us": silent["contact_us"] - 1}
    since = RECORD | {"since_us": NOW_US - 3600 * SECOND_US}
    yield of("lease", "silent for longer than a lease and a minute", terms=terms | over, line=since)
    new = RECORD | {"head": None, "holder": None, "leg": 0, "order_us": 0, "ticket": None}
    first = {"id": LINE, "leg": 1, "seq": 0}
    nothing = {"digest": None, "seq": 0, "step": 0}
    yield of("first", "the first leg", line=new, start=first, head=nothing, terms=terms | {"receipts": False})
    behind = RECORD | {"head": None, "leg": 1, "ticket": None}
    shown = {"line": behind, "ticket": RECORD["ticket"], "start": start | {"leg": 2}}
    yield of("ticket", "a ticket shows what was forgotten", **shown)
    fifth = _ticket(leg=2)
    forgot = {"line": behind, "ticket": sign("ticket", fifth, BROKER).encode().decode()}
    went_on = {"start": start | {"checkpoint": DIGEST, "seq": 5}, "head": {"digest": DIGEST, "seq": 5, "step": 120}}
    yield of("ticket-of-a-later-leg", "a ticket shows a leg that was forgotten", **forgot, **went_on)
    old = sign("ticket", FOURTH | {"seq": 3, "digest": "33" * 32}, BROKER).encode().decode()
    yield of("ticket-older", "an older ticket takes nothing back", ticket=old)
    back = {"checkpoint": "33" * 32, "counted": 4, "id": LINE, "leg": 3, "rewind": True, "seq": 3}
    rewind = order(digest="33" * 32, seq=3, rewind=True)
    to = {"digest": "33" * 32, "seq": 3, "step": 75}
    yield of("rewind", "an older checkpoint, by order", start=back, terms=rewind, stored_step=75, head=to)
    begin = {"counted": 4, "id": LINE, "leg": 3, "rewind": True, "seq": 0}
    again = order(digest=None, seq=0, rewind=True)
    yield of("rewind-to-the-beginning", "the beginning, by order", start=begin, terms=again, head=nothing)
    rewound = RECORD | {"head": to}
    onward = {name: one for name, one in back.items() if name != "rewind"}
    yield of("after-a-rewind", "a leg with rewind counted none", line=rewound, start=onward, head=to)

    yield of("no-line", "no such line", code="run-unknown", line=None)
    yield of("another-deployment", "another's", code="run-unknown", terms=terms | {"deployment": "55" * 16})
    yield of("same-leg", "released before", code="line-forked", start=start | {"leg": 2})
    yield of("older-leg", "released before", code="line-forked", start={"id": LINE, "leg": 1, "seq": 0})
    yield of("later-leg", "a leg is missing", code="checkpoint-stale", start=start | {"leg": 4})
    yield of("busy", "the leg before goes on", code="line-busy", terms=terms | {"receipts": False})
    yield of("silent", "for just a lease and a minute", code="line-busy", terms=terms | silent, line=since)
    for name, changes in (("older", {"seq": 3}), ("digest", {"checkpoint": DIGEST}), ("newer", {"seq": 5})):
        yield of(f"{name}-checkpoint", "not the head", code="checkpoint-stale", start=start | changes)
    uncounted = {name: one for name, one in onward.items() if name != "counted"}
    yield of("counted-missing", "a number twice", code="checkpoint-stale", line=rewound, start=uncounted)
    yield of("counted-another", "a number twice", code="checkpoint-stale", start=start | {"counted": 6})
    yield of("rewind-dropped", "the store has it no more", code="checkpoint-stale", start=back, terms=rewind)
    for name, changes in (("machines", {"machines": 1}), ("ranks", {"ranks": 2})):
        yield of(name, "another world", code="resume-world-mismatch", terms=terms | changes)
    refused = "line-order-missing"
    yield of("no-order", "more legs than the policy's", code=refused, terms=terms | {"max_legs": 2})
    yield of("rewind-without-order", "the gate rewinds nothing", code=refused, start=back, stored_step=75)
    orders = {
        "another-key": order(STRANGER),
        "another-leg": order(leg=4),
        "another-line": order(line="44" * 32),
        "another-deployment": order(deployment="55" * 16),
        "another-checkpoint": order(digest=DIGEST),
        "another-number": order(seq=5),
        "rewind": order(rewind=True),
        "older": order(serial_us=RECORD["order_us"]),
    }
    for name, with_order in orders.items():
        yield of(f"order-{name}", "an order that is not for this", code=refused, terms=with_order)
    ticket = sign("ticket", FOURTH | {"line": "44" * 32, "seq": 9}, BROKER).encode().decode()
    yield of("ticket-of-another-line", "another line's", code="checkpoint-foreign", ticket=ticket)
    forged = sign("ticket", fifth, STRANGER).encode().decode()
    yield of("ticket-of-another-gate", "another gate's", code="signature-invalid", ticket=forged)
