"""Whatever bytes come as a quote, as events or as Intel's lists: they are refused, by a code of check 12."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.dstack import dstack_evidence
from glasshouse.attestation.roots.dstack.dstack_events import DstackBlob
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.tdx import tdx_evidence
from glasshouse.wire.canonical import b64encode, encode
from simulators.dstack_agent import COMPOSE_HASH, KEY_PROVIDER, launched
from simulators.tdx_machine import EVALUATION, FMSPC, TdxMachine

# An altered certificate whose number is not positive is read, with a warning, and is not signed.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")

NOW = datetime(2026, 11, 1, tzinfo=UTC)
MACHINE = TdxMachine(now=NOW)
QUOTE, PACK = MACHINE.quote(bytes(64)), MACHINE.pack()
TERMS = {"fmspcs": [FMSPC], "images": [MACHINE.registers.image()], "tcb_evaluation": EVALUATION}
COMPOSED = {"chain": "workload", "compose_hashes": [COMPOSE_HASH.hex()], "key_providers": [KEY_PROVIDER]}
POLICY = HardwarePolicy.from_json({"dstack": {**COMPOSED, **TERMS}, "tdx": {"chain": "image", **TERMS}})


def refused(kind: str, blob: bytes, pack: Pack = PACK) -> None:
    appraise = {"dstack": dstack_evidence.appraise_blob, "tdx": tdx_evidence.appraise_blob}[kind]
    with pytest.raises(CheckFailedError) as raised:
        appraise(
            blob,
            b"\x01" * 64,  # which the quote is not bound to
            now_us=int(NOW.timestamp()) * 1_000_000,
            collateral=pack,
            policy=POLICY,
            root_sha256=MACHINE.root_sha256,
        )
    assert raised.value.check == "12"


@st.composite
def spliced(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of which a part is another's."""
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(max_size=300)) + data[at + draw(st.integers(0, 300)) :]


@given(st.sampled_from(["dstack", "tdx"]), st.binary(max_size=2000))
def test_any_bytes_as_a_blob(kind: str, data: bytes) -> None:
    refused(kind, data)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=6000), spliced(QUOTE)))
def test_any_bytes_as_a_quote(data: bytes) -> None:
    refused("tdx", encode({"quote": b64encode(data)}))
    refused("dstack", DstackBlob(events=tuple(launched()), quote=data).encode())


@settings(deadline=None)
@given(st.sampled_from(PACK.items), st.data())
def test_any_bytes_as_collateral(item: Item, data: st.DataObject) -> None:
    name, content = item.name, item.data
    pack = MACHINE.pack(**{name: data.draw(st.one_of(st.binary(max_size=500), spliced(content)))})
    refused("tdx", encode({"quote": b64encode(QUOTE)}), pack)
