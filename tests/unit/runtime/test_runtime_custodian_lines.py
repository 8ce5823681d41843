"""A leg of a line at the custodian: the checkpoint of its release opens, and no other."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.custodian.residue_patterns import PatternKind, ResiduePatterns
from glasshouse.errors import Code, GlasshouseError
from glasshouse.package.checkpoints.part_content import PartReader
from glasshouse.package.grant import Grant
from glasshouse.package.limits import CheckpointLimits
from glasshouse.package.streams import Positioned
from glasshouse.wire.crypto import HPKE_PRIVATE_BYTES
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import front_length, resume_key
from glasshouse.wire.lines.line_start import LineStart
from simulators.sealed_line import SealedCheckpoint, part_of, sealed_checkpoint
from tools.custodian_bench import DEPLOYMENT, CustodianBench
from tools.runtime_package import OwnersPackage, seal

LIMITS = CheckpointLimits(every_s=60, most=9, bytes=1 << 30)
PLAIN = tuple(part_of({f"state-{rank}": bytes([rank]) * 5000}) for rank in range(4))
GROUP = Group(id=bytes(range(32)), machines=2, machine=1, ranks=2)
FIRST = LineStart(id=bytes(range(32)), leg=1, seq=0)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> OwnersPackage:
    folder: Path = tmp_path_factory.mktemp("package")
    return seal(folder / "job.sealed", {"data.bin": bytes(range(256))}, job={"checkpoints": LIMITS.to_json()})


@pytest.fixture
def bench(package: OwnersPackage) -> Iterator[CustodianBench]:
    bench = CustodianBench(package, ranks=2)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def counted(package: OwnersPackage) -> SealedCheckpoint:
    """The checkpoint of two machines with two ranks each."""
    return sealed_checkpoint(
        package.key, deployment=DEPLOYMENT, manifest_sha256=package.manifest.sha256, plain=PLAIN, machines=2
    )


def patterns_of(bench: CustodianBench, kind: PatternKind) -> list[bytes]:
    return [bytes(window) for found, window in ResiduePatterns(bench.regions.patterns.view) if found is kind]


def test_a_leg_from_the_beginning_gets_the_public_half_of_its_lines_key(bench: CustodianBench) -> None:
    opened = bench.open(line=FIRST)
    key = resume_key(bench.package.key, deployment=DEPLOYMENT, line=FIRST.id)
    assert (opened.resume_public, opened.checkpoints) == (key.public, LIMITS)
    assert Grant.parse(bench.regions.grant.view).resume is None
    assert b"".join(patterns_of(bench, PatternKind.RESUME_PRIVATE)) == key.private()
    assert len(key.private()) == HPKE_PRIVATE_BYTES
    assert key.private()[:64] not in bytes(bench.regions.grant.view)


def test_a_run_of_no_line_gets_no_such_key(bench: CustodianBench) -> None:
    assert bench.open().resume_public is None
    assert patterns_of(bench, PatternKind.RESUME_PRIVATE) == []


def test_a_leg_that_goes_on_finds_the_keys_of_its_own_ranks_parts(
    bench: CustodianBench, counted: SealedCheckpoint
) -> None:
    given = counted.fronts(2, 3) + counted.header.encode()
    bench.open(line=counted.start, group=GROUP, checkpoint=given)
    resume = Grant.parse(bench.regions.grant.view).resume
    assert resume is not None
    assert (resume.seq, resume.step, [part.rank for part in resume.parts]) == (3, 30, [2, 3])
    bodies = b"".join(part[front_length(part) :] for part in counted.parts[2:])
    for part in resume.parts:
        reader = PartReader(Positioned(io.BytesIO(bodies)), part)
        reader.verify()
        assert list(reader.files) == [f"state-{part.rank}"]
    assert patterns_of(bench, PatternKind.CONTENT_KEY) == [part.key for part in resume.parts]


Given = Callable[[SealedCheckpoint], bytes]
OTHERS: dict[str, tuple[Given, Code]] = {
    "a header with another step": (
        lambda one: one.fronts(2, 3) + replace(one.header, step=31).encode(),
        Code.CHECKPOINT_TAMPERED,
    ),
    "the parts of other ranks": (lambda one: one.fronts(0, 1) + one.header.encode(), Code.CHECKPOINT_TAMPERED),
    "one part": (lambda one: one.fronts(2) + one.header.encode(), Code.CHECKPOINT_TAMPERED),
    "nothing": (lambda _: b"", Code.CHECKPOINT_TAMPERED),
    "a front with another bit": (
        lambda one: one.fronts(2) + flipped(one.fronts(3)) + one.header.encode(),
        Code.CHECKPOINT_TAMPERED,
    ),
}


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("what", OTHERS)
def test_what_a_store_changed_does_not_open_and_leaves_nothing(
    bench: CustodianBench, counted: SealedCheckpoint, what: str
) -> None:
    given, code = OTHERS[what]
    with pytest.raises(GlasshouseError) as caught:
        bench.open(line=counted.start, group=GROUP, checkpoint=given(counted))
    assert caught.value.code is code
    assert bench.regions.grant.is_zero()


@pytest.mark.parametrize(
    "other",
    [{"manifest_sha256": bytes(32)}, {"deployment": "00" * 16}, {"machines": 1}, {"machines": 4}],
    ids=["package", "deployment", "one machine", "four machines"],
)
def test_a_checkpoint_of_another_package_deployment_or_world_is_foreign(
    bench: CustodianBench, package: OwnersPackage, other: dict[str, object]
) -> None:
    """Whatever the gate released: the owner sealed one package, and a world is that of its first leg."""
    terms = {"deployment": DEPLOYMENT, "manifest_sha256": package.manifest.sha256, "machines": 2} | other
    foreign = sealed_checkpoint(package.key, plain=PLAIN, **terms)  # type: ignore[arg-type]
    with pytest.raises(GlasshouseError) as caught:
        bench.open(line=foreign.start, group=GROUP, checkpoint=foreign.fronts(2, 3) + foreign.header.encode())
    assert caught.value.code is Code.CHECKPOINT_FOREIGN
    assert bench.regions.grant.is_zero()


def test_an_agent_that_hands_over_an_older_checkpoint_than_was_released_opens_nothing(
    bench: CustodianBench, counted: SealedCheckpoint
) -> None:
    older = replace(counted.start, seq=2)
    with pytest.raises(GlasshouseError) as caught:
        bench.open(line=older, released=counted.start, group=GROUP, checkpoint=counted.fronts(2, 3))
    assert caught.value.code is Code.RELEASE_INVALID
    assert bench.regions.grant.is_zero()
