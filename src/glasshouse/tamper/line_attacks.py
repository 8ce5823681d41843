"""Attacks on a line: on the gate that counts its checkpoints, on the store that keeps them, and on who goes on.

The attacker has a machine that a leg was released to, or a stolen launch file of the next leg: keys of their own, and
everything that passed on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code, InternalError
from glasshouse.package.checkpoints.resume_parts import open_header
from glasshouse.tamper.line_stage import Leg, attest, flipped
from glasshouse.tamper.stage import Owner
from glasshouse.wire.canonical import b64decode, decode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.lines.statements import HEADER_RANK, MAX_PIECE_BYTES, Stored

_Row: TypeAlias = tuple[str, str, Code, Callable[[Owner], Reply], int]


def rollback(owner: Owner) -> Reply:
    """A launch from the first checkpoint, held back until a second was counted."""
    leg = Leg.begin(owner)
    first = leg.save(step=1)
    leg.lose()
    launch = owner.launch(line=leg.next(first))
    leg.save(step=2, after=first)
    return attest(owner, launch)[1]


def fork(owner: Owner) -> Reply:
    """Two launches of one leg, both genuine: the second runtime that attests."""
    leg = Leg.begin(owner)
    ticket = leg.save(step=1)
    leg.lose()
    launches = [owner.launch(line=leg.next(ticket)) for _ in range(2)]
    Leg.begin(owner, launch=launches[0])
    return attest(owner, launches[1])[1]


def comes_back(owner: Owner) -> Reply:
    """The machine that was believed lost has its next checkpoint counted after another went on."""
    leg = Leg.begin(owner)
    ticket = leg.save(step=1)
    sealed = leg.seal(step=2, seq=2, previous=ticket.digest)
    stored = leg.store(sealed)
    leg.lose()
    Leg.begin(owner, leg.next(ticket))
    return leg.count(sealed, stored)


def stores_on(owner: Owner) -> Reply:
    """The machine that was believed lost sends a part after another went on."""
    leg = Leg.begin(owner)
    leg.lose()
    Leg.begin(owner, leg.next(None))
    return leg.put(leg.seal(step=1))


def foreign_line(owner: Owner) -> Reply:
    """A part for the line of another training of the same owner."""
    leg, other = Leg.begin(owner), Leg.begin(owner)
    return leg.put(leg.seal(step=1), line=other.start.id)


def foreign_package(owner: Owner) -> Reply:
    """A header that names another package than its parts are of."""
    leg = Leg.begin(owner)
    sealed = leg.seal(step=1)
    leg.put(sealed).content()
    return leg.put_header(sealed.edited(manifest_sha256=bytes(32)))


def torn(owner: Owner) -> Reply:
    """A header whose part never came."""
    leg = Leg.begin(owner)
    return leg.put_header(leg.seal(step=1))


def altered(owner: Owner) -> Reply:
    """A part with one bit other than its machine signed."""
    leg = Leg.begin(owner)
    sealed = leg.seal(step=1)
    return leg.put(sealed, data=flipped(sealed.part))


def replayed(owner: Owner) -> Reply:
    """Another checkpoint of a number that was counted, with the statement that was stored of the first."""
    leg = Leg.begin(owner)
    sealed = leg.seal(step=1)
    stored = leg.store(sealed)
    leg.count(sealed, stored).content()
    return leg.count(leg.seal(step=2), stored)


def not_holder(owner: Owner) -> Reply:
    """A checkpoint that is stored, counted under a key that nothing was released to."""
    leg = Leg.begin(owner)
    sealed = leg.seal(step=1)
    return leg.count(sealed, leg.store(sealed), key=SigningKey.generate())


def claims_to_store(owner: Owner) -> Reply:
    """A checkpoint that is stored nowhere, with a statement that the attacker signed."""
    leg = Leg.begin(owner)
    header = leg.seal(step=1).header
    stated = Stored(deployment=header.deployment, digest=header.digest, leg=1, line=header.line, seq=1)
    return leg.count(leg.seal(step=1), stated.sign(SigningKey.generate()))


def goes_on(owner: Owner) -> Reply:
    """The next leg reads the checkpoint that it was released for."""
    leg = Leg.begin(owner)
    ticket = leg.save(step=1)
    leg.lose()
    later = Leg.begin(owner, leg.next(ticket))
    reply = later.read(rank=HEADER_RANK)
    answer = decode(reply.content(), max_bytes=MAX_PIECE_BYTES)
    if not isinstance(answer, dict) or not isinstance(data := answer["data"], str):
        raise InternalError(Code.INTERNAL, "the store answered something that is no part of a checkpoint")
    open_header(
        b64decode(data),
        later.start,
        deployment=owner.deployment,
        manifest_sha256=owner.manifest.sha256,
        machines=1,
        ranks=1,
    )
    later.save(step=2, after=ticket)
    return reply


_CHANGED = {
    "line: rollback": "nothing: a launch from a checkpoint that is not the last any more",
    "line: fork": "nothing: two genuine launches of one leg, of which the other was released",
    "line: an old leg counts": "nothing: a genuine checkpoint, after another machine went on",
    "line: an old leg stores": "nothing: a genuine part, after another machine went on",
    "line: another's line": "the line in a part's claim: another training of the same owner",
    "line: another package": "the manifest hash in a header",
    "line: torn": "nothing: a header before its part",
    "line: an altered part": "one bit of a sealed part, after it was signed for",
    "line: a replayed statement": "the checkpoint, beside what the store stated of the one before",
    "line: not the holder": "the evidence key: one that nothing was released to",
    "line: a store that lies": "the store key: the attacker's",
}
_REFUSED = {
    "line: rollback": ("15", Code.CHECKPOINT_STALE, rollback, 1),
    "line: fork": ("15", Code.LINE_FORKED, fork, 1),
    "line: an old leg counts": ("", Code.LINE_SUPERSEDED, comes_back, 1),
    "line: an old leg stores": ("", Code.LINE_SUPERSEDED, stores_on, 1),
    "line: another's line": ("", Code.RUN_UNKNOWN, foreign_line, 2),
    "line: another package": ("", Code.CHECKPOINT_FOREIGN, foreign_package, 1),
    "line: torn": ("", Code.CHECKPOINT_INCOMPLETE, torn, 1),
    "line: an altered part": ("", Code.UPLOAD_DAMAGED, altered, 1),
    "line: a replayed statement": ("", Code.CHECKPOINT_INCOMPLETE, replayed, 1),
    "line: not the holder": ("", Code.RUN_UNKNOWN, not_holder, 1),
    "line: a store that lies": ("", Code.CHAIN_DELEGATION, claims_to_store, 1),
}
LINE_ATTACKS: dict[str, _Row] = {name: (_CHANGED[name], *row) for name, row in _REFUSED.items()}
"""By name: what is changed, the check that must notice (a store's have no numbers), the code, the play, and how many
lines it begins, each with a first leg that counts."""
