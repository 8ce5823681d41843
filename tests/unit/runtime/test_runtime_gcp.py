"""Tokens are asked of the launcher of Confidential Space; what is no token is none."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.gcp.gcp_blob import MAX_TOKEN_BYTES
from glasshouse.attestation.roots.gcp.gcp_token import read_token
from glasshouse.attestation.roots.kinds import GCP_AUDIENCE
from glasshouse.errors import Code, PlatformError
from glasshouse.jobs.references import hardware_draft
from glasshouse.runtime.roots import collectors
from glasshouse.runtime.roots.gcp import GcpCollector
from glasshouse.runtime.run import findings
from simulators.confidential_space import IMAGE_DIGEST, ConfidentialSpace

BOUND = Bound(composite=bytes(range(32)))


@pytest.fixture(scope="module")
def space() -> ConfidentialSpace:
    return ConfidentialSpace(now=datetime(2026, 11, 1, tzinfo=UTC))


def test_the_launcher_is_asked_for_this_run(space: ConfidentialSpace, tmp_path: Path) -> None:
    path = tmp_path / "teeserver.sock"
    collector = GcpCollector(str(path))
    assert "no container of Confidential Space" in collector.look()
    with space.launcher(path):
        assert collector.look() == ""
        assert collector.prepare() is None
        token = collector.collect(bound=BOUND, credential=None)
        collector.close()
    now_us = int(space.now.timestamp()) * 1_000_000
    said, _ = read_token(token, root_sha256=space.root_sha256, now_us=now_us)
    assert (said["eat_nonce"], said["aud"]) == (BOUND.gcp_nonce, GCP_AUDIENCE)


_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "instead",
    [
        b"",
        b"HTTP/1.0 500 Internal Server Error\r\n\r\nfailed to retrieve custom attestation service token",
        b"HTTP/1.0 200 OK\r\n",
        _HEAD,
        _HEAD + b"e30.e30",
        _HEAD + b"e30.e30.e30\n",
        _HEAD + b"e30.e30." + b"e" * MAX_TOKEN_BYTES,
        _HEAD + b"e" * (4 * MAX_TOKEN_BYTES),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_an_answer_that_is_no_token(space: ConfidentialSpace, tmp_path: Path, instead: bytes) -> None:
    path = tmp_path / "teeserver.sock"
    with (
        space.launcher(path, instead=instead),
        pytest.raises(PlatformError, match="the launcher of Confidential Space") as raised,
    ):
        GcpCollector(str(path)).collect(bound=BOUND, credential=None)
    assert raised.value.code is Code.HARDWARE_UNAVAILABLE


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="does not answer"):
        GcpCollector(str(tmp_path / "teeserver.sock")).collect(bound=BOUND, credential=None)


def test_doctor_says_whose_word_it_is(
    space: ConfidentialSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "teeserver.sock"
    monkeypatch.setattr(findings, "collector_of", lambda _: GcpCollector(str(path)))
    with space.launcher(path):
        found = findings._root(findings.KINDS["gcp"], path)
    assert found.standing is findings.Standing.GOOD
    assert found.consequence.startswith("can stand behind tpm, ")
    assert found.consequence.endswith("; it is Google's word about Google's machine")


def test_a_draft_leaves_it_to_the_owner_to_take_googles_word(
    space: ConfidentialSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "teeserver.sock"
    monkeypatch.setattr(GcpCollector.__init__, "__defaults__", (str(path),))
    assert isinstance(collectors.collector_of("gcp"), GcpCollector)
    with space.launcher(path):
        [seen] = [one for one in hardware_draft.look_at_hardware() if one.kind == "gcp"]
    assert seen.draft["accept_issuers_word"] is False
    assert seen.draft["image_digests"] == [IMAGE_DIGEST.hex()]
    assert "accept_issuers_word = false" in hardware_draft.draft_of([seen])
