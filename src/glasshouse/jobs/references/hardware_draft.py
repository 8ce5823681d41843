"""Drafts a policy of `[policy] hardware` from what a machine's hardware shows of itself.

Law: nothing here is a reference value yet. Evidence is collected for no run and not appraised: what it shows is what
the machine was when it was looked at, in whoever's hands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_registers import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_structures import check_ak
from glasshouse.errors import GlasshouseError
from glasshouse.runtime.roots.collectors import CLASSES, collector_of
from glasshouse.wire.canonical import Json

HEAD = """\
# A draft for [policy] hardware, of what this machine shows now. Values that were seen on a machine that is not trusted
# are not reference values yet: take them from a machine of your own that runs the same image, or compute them from the
# image. See docs/security/hardware.md.
"""
_UNUSED = bytes(32)  # a register that nothing was measured into


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a machine shows of one kind."""

    kind: str
    missing: str = ""  # why there is nothing, in one sentence
    draft: Mapping[str, Json] = field(default_factory=dict)  # of the policy's object


def look_at_hardware() -> list[Seen]:
    """Look at this machine's roots of trust, and collect what they say, bound to nothing."""
    return [_seen(kind) for kind in sorted(CLASSES)]


def _seen(kind: str) -> Seen:
    try:
        collector = collector_of(kind)
        if missing := collector.look():
            return Seen(kind=kind, missing=missing)
        if kind not in _DRAFTS:
            return Seen(kind=kind, missing="it is offered; its object in the policy is written by hand")
        try:
            collector.prepare()
            return Seen(
                kind=kind, draft=_DRAFTS[kind](collector.collect(bound=Bound(composite=bytes(32)), credential=None))
            )
        finally:
            collector.close()
    except GlasshouseError as error:
        return Seen(kind=kind, missing=error.message)


def _tpm(blob: bytes) -> dict[str, Json]:
    found = TpmBlob.parse(blob)
    used = {str(index): [value.hex()] for index, value in zip(QUOTED_PCRS, found.pcrs, strict=True) if value != _UNUSED}
    return {"aks": [check_ak(found.ak).hex()], "chain": "image", "pcrs": used}


_DRAFTS: Mapping[str, Callable[[bytes], dict[str, Json]]] = {"tpm": _tpm}
_NOTES = {
    "tpm": 'aks names this TPM alone; ek_roots = ["maker.pem"] in its place takes each TPM of a maker, activated.\n'
    "# Of pcrs keep 0, 2, 4, 7 and what measures kernel, initrd and command line: spec/hardware-evidence.md, 7.1.",
}


def draft_of(seen: Sequence[Seen]) -> str:
    """Return the draft in TOML, with what is missing as comments."""
    lines = [HEAD]
    for one in seen:
        if one.missing:
            lines.append(f"# {one.kind}: {one.missing}\n")
    for one in seen:
        if not one.missing:
            if note := _NOTES.get(one.kind):
                lines.append(f"\n# {note}\n")
            lines += _table((one.kind,), one.draft)
    return "".join(lines)


def _table(path: tuple[str, ...], values: Mapping[str, Json]) -> Iterator[str]:
    """Yield a table with its sub-tables; texts, numbers and lists of them are the same in TOML as in JSON."""
    yield f"[{'.'.join(path)}]\n"
    for name, value in values.items():
        if not isinstance(value, dict) and not _tables(value):
            yield f"{_key(name)} = {json.dumps(value)}\n"
    for name, value in values.items():
        if isinstance(value, dict):
            yield "\n"
            yield from _table((*path, _key(name)), value)
        elif isinstance(value, list) and _tables(value):
            for one in value:
                assert isinstance(one, dict)  # noqa: S101 - `_tables`
                yield f"\n[[{'.'.join((*path, _key(name)))}]]\n"
                yield from (f"{_key(inner)} = {json.dumps(each)}\n" for inner, each in one.items())


def _tables(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)
