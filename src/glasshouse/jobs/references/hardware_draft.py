"""Drafts a policy of `[policy] hardware` from what a machine's hardware shows of itself.

Law: nothing here is a reference value yet. Evidence is collected for no run and not appraised: what it shows is what
the machine was when it was looked at, and not whether it was as it should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.dstack.dstack_events import DstackBlob
from glasshouse.attestation.roots.tdx.tdx_quote import TdxBlob, TdxQuote
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_quote import check_ak
from glasshouse.errors import GlasshouseError
from glasshouse.runtime.roots.collectors import CLASSES, collector_of
from glasshouse.wire.canonical import Json

HEAD = """\
# A draft for [policy] hardware, of what this machine shows now. Values that were seen on a machine that is not trusted
# are not reference values yet: take them from a machine of your own that runs the same image, or compute them from the
# image. See docs/security/hardware.md.
"""
_FMSPC = bytes.fromhex("060a2a864886f84d010d01040406")  # before it in a processor's certificate
_EVALUATION = 17  # Intel's of 2025
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


def _tdx(blob: bytes) -> dict[str, Json]:
    return {"chain": "image", **_of_quote(TdxBlob.parse(blob).quote)}


def _dstack(blob: bytes) -> dict[str, Json]:
    found = DstackBlob.parse(blob)
    written = {event.name: event.payload for event in reversed(found.events)}
    return {
        "chain": "workload",
        "compose_hashes": [written.get("compose-hash", b"").hex()],
        "key_providers": [written.get("key-provider", b"").decode("latin-1")],
        **_of_quote(found.quote),
    }


def _of_quote(raw: bytes) -> dict[str, Json]:
    quote = TdxQuote.parse(raw)
    shown, extensions = quote.report, quote.chain[0].public_bytes(Encoding.DER)
    found: dict[str, Json] = {
        "fmspcs": [extensions.partition(_FMSPC)[2][:6].hex().upper()],
        "images": [{"mrtd": shown.mrtd.hex(), "rtmr0": [shown.rtmr0.hex()], "rtmr1": shown.rtmr1.hex(),
                    "rtmr2": shown.rtmr2.hex()}],
        "tcb_evaluation": _EVALUATION,
    }  # fmt: skip
    return found if shown.mrconfigid == bytes(48) else found | {"config_ids": [shown.mrconfigid.hex()]}


_DRAFTS: Mapping[str, Callable[[bytes], dict[str, Json]]] = {"dstack": _dstack, "tdx": _tdx, "tpm": _tpm}
_NOTES = {
    "dstack": "Compare compose_hashes with sha256sum app-compose.json, images with dstack-mr for this shape, and know\n"
    "# who has key_providers: docs/how-to/dstack.md. tcb_evaluation is better Intel's present number.",
    "tdx": "images are this shape of machine's; tcb_evaluation is better Intel's present number.",
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
