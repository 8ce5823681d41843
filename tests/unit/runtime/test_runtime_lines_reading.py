"""The checkpoint that a leg goes on from, out of a store that may have anything: what comes is it, or ends the run."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError, PeerError, RefusedError, RunError
from glasshouse.handshake.launch import LaunchFile, TokenClaims
from glasshouse.runtime.confine import read_only_package
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.lines import checkpoint_reader, leg_run
from glasshouse.runtime.lines.checkpoint_reader import CheckpointReader
from glasshouse.runtime.lines.leg_run import LegRun
from glasshouse.runtime.loop import Loop
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.lines.checkpoint import front_length
from glasshouse.wire.lines.statements import HEADER_RANK, MAX_DATA_BYTES, READ_PATH, ReadRequest
from simulators.direct_gate import DirectGate, LineOwner
from simulators.sealed_line import part_of, sealed_checkpoint

KEY, RUN = SigningKey.generate(), "5d" * 16
PLAIN = part_of({"state": bytes(range(256)) * 1600})
KEPT = sealed_checkpoint(bytes(32), deployment="00" * 16, manifest_sha256=bytes(32), plain=(PLAIN, PLAIN))
Answer = Callable[[ReadRequest, bytes], bytes | GlasshouseError]


def honest(request: ReadRequest, whole: bytes) -> bytes:
    data = whole[request.start : request.start + MAX_DATA_BYTES]
    return encode({"bytes": len(whole), "data": b64encode(data)})


class Store:
    """Has the checkpoint; `faults` answer instead, in turn, while there are any."""

    def __init__(self, *faults: Answer) -> None:
        self.faults, self.asked = list(faults), list[tuple[int, int]]()

    def post(self, path: str, body: bytes) -> bytes:
        assert path == READ_PATH
        request = ReadRequest.parse_signed(body, KEY.public)
        assert (request.line, request.run_id) == (KEPT.header.line, RUN)
        self.asked.append((request.rank, request.start))
        whole = KEPT.header.encode() if request.rank == HEADER_RANK else KEPT.parts[request.rank]
        answer = (self.faults.pop(0) if self.faults else honest)(request, whole)
        if isinstance(answer, GlasshouseError):
            raise answer
        return answer


def read(store: Store) -> bytes:
    """Read header and second part, as a machine with the second rank does."""
    reader = CheckpointReader(Loop(), store, KEPT.start, run_id=RUN, key=KEY)  # type: ignore[arg-type]
    header, out = reader.header(), io.BytesIO()
    front = reader.front(1, header.parts[1])
    reader.copy_chunks(1, header.parts[1], front, out)
    return front + out.getvalue()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "_FIRST_RETRY_S", 0.01)


def test_header_front_and_chunks_come_in_pieces_and_after_silence_again() -> None:
    def away(_request: ReadRequest, _whole: bytes) -> GlasshouseError:
        return PeerError(Code.BROKER_UNREACHABLE, "away")

    store = Store(away, honest, away, honest, away)
    assert read(store) == KEPT.parts[1]
    front = front_length(KEPT.parts[1])
    assert store.asked[:5] == [(HEADER_RANK, 0), (HEADER_RANK, 0), (1, 0), (1, 0), (1, front)]
    assert len(store.asked) == 5 + 3


def changed(**members: Any) -> Answer:
    return lambda _request, whole: encode({"bytes": len(whole), "data": b64encode(whole[:1000])} | members)


def flipped(request: ReadRequest, whole: bytes) -> bytes:
    at = request.start + 500
    return honest(request, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])


LIES: dict[str, tuple[int, Answer]] = {
    "the header of another": (0, lambda request, _whole: honest(request, replace(KEPT.header, step=31).encode())),
    "a header without an end": (0, changed(bytes=1 << 40, data=b64encode(bytes(100)))),
    "nothing of a header": (0, changed(data="")),
    "no answer at all": (0, lambda _request, _whole: b"{}"),
    "another front": (1, flipped),
    "no front": (1, changed(data=b64encode(bytes(1000)))),
    "another chunk": (2, flipped),
    "another rank's part": (1, lambda request, _whole: honest(request, KEPT.parts[0])),
    "a longer part": (2, lambda request, whole: honest(request, whole + b"more")),
    "a shorter part": (2, lambda request, whole: honest(request, whole[:-1])),
    "nothing more of a part": (2, changed(data="")),
}


@pytest.mark.parametrize("lie", LIES)
def test_anything_else_ends_the_run(lie: str) -> None:
    before, answer = LIES[lie]
    with pytest.raises(PackageError) as caught:
        read(Store(*[honest] * before, answer))
    assert caught.value.code is Code.CHECKPOINT_TAMPERED


def test_what_the_gate_refuses_is_not_asked_for_again() -> None:
    store = Store(lambda _request, _whole: RefusedError(Code.CHECKPOINT_INCOMPLETE, "not here"))
    with pytest.raises(RefusedError):
        read(store)
    assert len(store.asked) == 1


@pytest.fixture
def leg(tmp_path: Path) -> Iterator[tuple[LegRun, list[str]]]:
    """A machine of two ranks that goes on from the checkpoint, and its notices."""
    gate = DirectGate(tmp_path / "gate")
    owner = LineOwner(gate)
    place = owner.client().add_group(owner.deployment, machines=1, ranks=2)[0]
    launch, notices = replace(owner.leg(group=place).actor.launch, run_id=RUN), list[str]()
    claims = launch.claims()
    made = LegRun(
        Loop(),
        Store(),  # type: ignore[arg-type]
        OutDir(str(tmp_path / "out")),
        Launch(launch, claims),  # type: ignore[arg-type]
        owner.manifest,
        KEPT.start,
        evidence_key=KEY,
        environment_sha256=bytes([1]) * 32,
        lease_s=60,
        record=lambda *_: None,
        notice=notices.append,
        tell=lambda _message: None,
    )
    yield made, notices
    made.close()
    gate.close()


class Launch:
    """A launch file whose run has another name than its token's."""

    def __init__(self, launch: LaunchFile, claims: TokenClaims) -> None:
        self.delegation, self.broker_public, self.run_id = launch.delegation, launch.broker_public, launch.run_id
        self.claims = lambda: claims


def test_the_worker_is_handed_memory_by_which_nothing_reaches_a_disk(leg: tuple[LegRun, list[str]]) -> None:
    made, notices = leg
    memory = io.BytesIO()
    made.hand_over(memory)
    assert memory.getvalue() == KEPT.fronts(0, 1) + KEPT.header.encode()
    assert notices == ["environment-changed"]
    made.fetch()
    assert made.resumed is not None
    assert read_only_package.kind(REAL, made.resumed) == read_only_package.MEMORY
    chunks = b"".join(part[front_length(part) :] for part in KEPT.parts)
    assert os.pread(made.resumed, len(chunks) + 1, 0) == chunks
    with pytest.raises(OSError, match="Operation not permitted"):
        os.open(f"/proc/self/fd/{made.resumed}", os.O_RDWR | os.O_TRUNC)
    made.restored()
    assert made.resumed is None


def test_one_that_does_not_fit_into_memory_is_not_fetched(
    leg: tuple[LegRun, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = leg
    made.hand_over(io.BytesIO())
    monkeypatch.setattr(leg_run.memory_limits, "available_bytes", lambda: sum(map(len, KEPT.parts)))
    with pytest.raises(RunError) as caught:
        made.fetch()
    assert caught.value.code is Code.OUT_OF_MEMORY
    assert made.resumed is None
