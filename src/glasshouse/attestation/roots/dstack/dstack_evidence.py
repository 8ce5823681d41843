"""Appraises the evidence of kind `dstack`: a quote of TDX, and the events of its measured launcher.

Laws: every byte of an event is in its digest, which is made here; what an application may have written decides nothing.
Source: spec/hardware-evidence.md, section 7.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.dstack.dstack_events import DstackBlob, DstackEvent, replay
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.refusing import check_listed, refusal, refused
from glasshouse.attestation.roots.tdx import tdx_evidence as tdx
from glasshouse.attestation.roots.tdx.tdx_signatures import Judge
from glasshouse.errors import Code

# What the launcher writes, in its order, before the first container starts; the others are not looked at.
_LAUNCH = ("app-id", "compose-hash", "instance-id", "boot-mr-done", "key-provider", "system-ready")


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise a blob; raises `CheckFailedError`, in the order of the specification's table."""
    root_sha256 = tdx.INTEL_ROOT_SHA256
    return appraise_blob(
        blob, bound.report_data, now_us=now_us, collateral=collateral, policy=policy, root_sha256=root_sha256
    )


def appraise_blob(
    blob: bytes, report_data: bytes, *, now_us: int, collateral: Pack, policy: HardwarePolicy, root_sha256: bytes
) -> Appraised:
    """Appraise a blob that has to be bound to this report data and lead to this root; raises `CheckFailedError`."""
    terms = policy.dstack
    assert terms is not None  # noqa: S101 - the caller's rule: the policy names the kind
    with refused(Code.HARDWARE_MALFORMED, "the blob dstack"):
        read = DstackBlob.parse(blob)
    # The host's claim of what will run, which is of no use where it is another than what the launcher measured.
    composed = next((event.payload for event in read.events if event.name == "compose-hash"), b"")
    config_ids = (*terms.config_ids, (b"\x01" + composed).ljust(48, b"\x00"))
    judge = Judge(collateral, root_sha256=root_sha256, now_us=now_us)
    report, found = tdx.appraise_quote(read.quote, judge, terms=terms, ages=policy.collateral, config_ids=config_ids)
    if (replayed := replay(read.events)) != report.rtmr3:
        raise refusal(Code.DSTACK_EVENT, "the events are not those of RTMR3", report.rtmr3, replayed)
    launch = _launch(read.events)
    compose, provider = launch["compose-hash"], launch["key-provider"]
    check_listed("compose-hash", compose.hex(), map(bytes.hex, terms.compose_hashes))
    check_listed("key-provider", provider.decode("latin-1"), terms.key_providers)
    tdx.check_binding(report, report_data)
    return replace(found, claims={**found.claims, "app_id": launch["app-id"].hex(), "compose_hash": compose.hex()})


def _launch(events: Sequence[DstackEvent]) -> dict[str, bytes]:
    """Return the payloads of the launcher's events, each there once, in its order.

    A second one of a name, even behind the launcher's last, is an application's that would be taken for it.
    """
    launch = [event for event in events if event.name in _LAUNCH]
    names = [event.name for event in launch]
    if names != [*_LAUNCH]:
        what = "the launcher's events are not each there once, in its order"
        raise refusal(Code.DSTACK_EVENT, what, _LAUNCH, names[: 2 * len(_LAUNCH)])
    return {event.name: event.payload for event in launch}
