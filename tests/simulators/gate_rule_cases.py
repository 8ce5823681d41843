"""Reads the vectors of the gate's rules about lines."""

from __future__ import annotations

from typing import Any

from glasshouse.errors import Code, RefusedError
from glasshouse.handshake.lines import (
    Counter,
    Head,
    LineRecord,
    Terms,
    check_15_line,
    check_rewound,
    count,
    open_message,
    shown,
)
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import CHECKPOINT_TYPE, Ticket


def read_count(given: dict[str, Any]) -> dict[str, Any]:
    line = _line(given)
    envelope, message = open_message(given["message"].encode())
    signer = envelope.signatures[0][0]
    legs = {(one["run_id"], key_id(bytes.fromhex(one["evidence_public"]))): one for one in given["legs"]}
    leg = legs.get((message.run_id, signer))
    if leg is None or line is None:
        raise RefusedError(Code.RUN_UNKNOWN, "no leg was released to this key")
    envelope.verify(CHECKPOINT_TYPE, bytes.fromhex(leg["evidence_public"]))
    manifest_sha256, store = bytes.fromhex(given["manifest_sha256"]), given["store_public"]
    counter = Counter(
        leg=leg["leg"], machine=leg["machine"], run_id=leg["run_id"], holder=signer, manifest_sha256=manifest_sha256
    )
    store_public = None if store is None else bytes.fromhex(store)
    ticket = count(line, message, counter, store_public=store_public, now_us=given["now_us"])
    return {"ticket": ticket.to_json()}


def read_launch(given: dict[str, Any]) -> dict[str, Any]:
    line, terms, now_us = _line(given), given["terms"], given["now_us"]
    if line is not None and given["ticket"] is not None:
        line = shown(line, _ticket(given["ticket"], given), now_us=now_us)
    over = ""
    if line is not None:
        last = {name: terms[name] for name in ("receipts", "contact_us", "lease_s")}
        over = line.ended(**last, now_us=now_us)
    start, order = LineStart.from_json(given["start"]), terms["order"]
    judged = Terms(
        **{name: terms[name] for name in ("deployment", "machines", "ranks", "max_legs")},
        owner=bytes.fromhex(terms["owner"]),
        over=over,
        order=None if order is None else Envelope.parse(order.encode(), max_bytes=len(order)),
    )
    line = check_15_line(line, start, judged)
    head = check_rewound(start, given["stored_step"]) if start.rewind else line.head
    digest = None if head.digest is None else head.digest.hex()
    return {"head": {"digest": digest, "seq": head.seq, "step": head.step}, "order_us": line.order_us}


def _line(given: dict[str, Any]) -> LineRecord | None:
    if given["line"] is None:
        return None
    line = dict(given["line"])
    head, ticket = line.pop("head"), line.pop("ticket")
    return LineRecord(
        **line | {"id": bytes.fromhex(line["id"])},
        head=Head() if head is None else Head(**head | {"digest": bytes.fromhex(head["digest"])}),
        ticket=None if ticket is None else _ticket(ticket, given),
    )


def _ticket(text: str, given: dict[str, Any]) -> Ticket:
    return Ticket.parse_signed(text.encode(), bytes.fromhex(given["broker_public"]))
