"""Drafts a policy of `[policy] hardware` from what a machine's hardware shows of itself.

Laws: nothing here is a reference value yet. Evidence is collected for no run and not appraised: what it shows is what
the machine was when it was looked at, and not whether it was as it should be. A draft names no chain, so that it is no
policy before its owner put that in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.kinds import KINDS, NVIDIA
from glasshouse.attestation.roots.levels import level_of
from glasshouse.errors import FormatError, GlasshouseError
from glasshouse.jobs.references.hardware_values import CHAINS, NOTES, values_of
from glasshouse.runtime.roots.collectors import CLASSES, collector_of
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import Assurance

HEAD = """\
# A draft for [policy] hardware, of what this machine shows now, which nothing has verified. It is no policy yet:
# compare each value as is written above it, on a machine of your own or by what you compute from the image, and put
# its chain in last. See docs/security/hardware.md.
"""
_INSTEAD = {"tdx": "dstack", "tpm": "azure"}
"""Of two kinds by which the same part of a machine answers, the one that a policy takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a machine shows of one kind."""

    kind: str
    missing: str = ""  # why there is nothing, in one sentence
    draft: Mapping[str, Json] = field(default_factory=dict)  # of the policy's object


def look_at_hardware() -> list[Seen]:
    """Look at this machine's roots of trust, and collect what they say, bound to nothing."""
    seen = [_seen(kind) for kind in sorted(CLASSES)]
    shown = {one.kind for one in seen if not one.missing}
    return [_left_out(one) if _INSTEAD.get(one.kind) in shown and one.kind in shown else one for one in seen]


def _left_out(one: Seen) -> Seen:
    return Seen(kind=one.kind, missing=f"it is offered, and {_INSTEAD[one.kind]} shows more of the same machine")


def _seen(kind: str) -> Seen:
    try:
        collector = collector_of(kind)
        if missing := collector.look():
            return Seen(kind=kind, missing=missing)
        try:
            collector.prepare()
            blob = collector.collect(bound=Bound(composite=bytes(32)), credential=None)
        finally:
            collector.close()
        return Seen(kind=kind, draft=values_of(kind, blob))
    except (FormatError, LookupError, ValueError) as error:
        return Seen(kind=kind, missing=f"it gave what this version does not read: {error}")
    except GlasshouseError as error:
        return Seen(kind=kind, missing=error.message)


def draft_of(seen: Sequence[Seen]) -> str:
    """Return the draft in TOML, with what is missing as comments."""
    lines = [HEAD]
    for one in seen:
        if one.missing:
            # In one line, whatever the machine's services put into it: what is behind a break would be policy.
            lines.append(f"# {one.kind}: {' '.join(one.missing.split())}\n")
    shown = [one.kind for one in seen if not one.missing]
    level = level_of(shown) or level_of([kind for kind in shown if kind != NVIDIA]) or Assurance.SOFTWARE
    lines.append(f'# What is offered here reaches [policy] assurance = "{level}", and no more.\n')
    for one in seen:
        if not one.missing:
            lines.append(f"\n# {KINDS[one.kind].title}\n")
            lines += _table((one.kind,), one.draft)
    return "".join(lines)


def _table(path: tuple[str, ...], values: Mapping[str, Json]) -> Iterator[str]:
    """Yield a table with its sub-tables; texts, numbers and lists of them are the same in TOML as in JSON."""
    if len(path) == 1 or not all(isinstance(value, dict) for value in values.values()):
        yield f"[{'.'.join(path)}]\n"
    if path[0] in CHAINS and len(path) == 1:
        yield f'# chain = "{CHAINS[path[0]]}"  # put in when each value below was compared\n'
    for name, value in values.items():
        if not isinstance(value, dict) and not _tables(value):
            yield from _note(path, name)
            yield f"{_key(name)} = {json.dumps(value)}\n"
    for name, value in values.items():
        if isinstance(value, dict):
            yield "\n"
            yield from _note(path, name)
            yield from _table((*path, _key(name)), value)
        elif isinstance(value, list) and _tables(value):
            for one in value:
                assert isinstance(one, dict)  # noqa: S101 - `_tables`
                yield "\n"
                yield from _note(path, name)
                yield f"[[{'.'.join((*path, _key(name)))}]]\n"
                yield from (f"{_key(inner)} = {json.dumps(each)}\n" for inner, each in one.items())


def _note(path: tuple[str, ...], name: str) -> Iterator[str]:
    note = NOTES.get(".".join((*path, name)), NOTES.get(name, ""))
    yield from (f"# {line}\n" for line in wrap(note, 112, break_long_words=False))


def _tables(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)


if __name__ == "__main__":  # on a machine that has a bundle and no commands
    sys.stdout.write(draft_of(look_at_hardware()))
