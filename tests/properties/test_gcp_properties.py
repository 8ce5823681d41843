"""Whatever comes as a token of Google's, or under a signature that holds: it is refused, by a code of check 12."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.gcp.gcp_evidence import appraise_claims
from glasshouse.attestation.roots.gcp.gcp_policy import GcpPolicy
from glasshouse.attestation.roots.gcp.gcp_token import read_token
from glasshouse.attestation.roots.kinds import GCP_AUDIENCE
from glasshouse.wire.canonical import b64encode
from simulators.confidential_space import ConfidentialSpace

# An altered certificate whose number is not positive is read, with a warning, and is not signed.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")

SPACE = ConfidentialSpace(now=datetime(2026, 11, 1, tzinfo=UTC))
NOW_US = int(SPACE.now.timestamp()) * 1_000_000
TERMS = GcpPolicy.from_json(SPACE.terms())
NONCE = "a nonce of another run's"
TOKEN = SPACE.token("0" * 64)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
PATHS = [
    *SPACE.claims(NONCE),
    *(f"submods.{name}" for name in SPACE.claims(NONCE)["submods"]),
    "submods.container.image_digest",
    "submods.container.env_override",
    "submods.confidential_space.support_attributes",
]


def appraise(token: bytes) -> Appraised:
    said, end_us = read_token(token, root_sha256=SPACE.root_sha256, now_us=NOW_US)
    return appraise_claims(said, end_us, audience=GCP_AUDIENCE, nonce=NONCE, now_us=NOW_US, terms=TERMS)


def refused(token: bytes) -> None:
    with pytest.raises(CheckFailedError) as raised:
        appraise(token)
    assert raised.value.check == "12"


@st.composite
def spliced(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of which a part is another's."""
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(max_size=300)) + data[at + draw(st.integers(0, 300)) :]


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=2000), spliced(TOKEN)))
def test_any_bytes_as_a_token(data: bytes) -> None:
    refused(data)


@settings(deadline=None)
@given(
    st.one_of(st.binary(max_size=500), spliced(json.dumps({"alg": "RS256", "x5c": ["AA==", "AA==", "AA=="]}).encode()))
)
def test_any_bytes_as_a_header(data: bytes) -> None:
    refused(f"{b64encode(data or b'0')}.e30.e30".encode())


@settings(deadline=None)
@given(JSON)
def test_any_json_under_googles_signature(said: Any) -> None:
    refused(SPACE.token(NONCE, payload=json.dumps(said).encode()))


@settings(deadline=None)
@given(st.sampled_from(PATHS), JSON)
def test_any_value_of_a_claim_is_refused_or_is_what_it_was(name: str, value: Any) -> None:
    """Nothing but a refusal or an appraisal comes of what Google may say one day."""
    good = SPACE.claims(NONCE)
    inner, (*above, last) = good, name.split(".")
    for step in above:
        inner = inner[step]
    inner[last] = value
    try:
        found = appraise(SPACE.token(NONCE, payload=json.dumps(good).encode()))
    except CheckFailedError as error:
        assert error.check == "12"  # noqa: PT017 - the other end is as good
    else:
        assert dict(found.vector) == {"hardware": 32}
