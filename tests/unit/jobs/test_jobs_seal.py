"""Sealing leaves a package and its key, or neither."""

from __future__ import annotations

import errno
import importlib.util
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.define.jobfile import Job, parse
from glasshouse.jobs.define.package_records import KeyStore, PackageRecord, Sealed, public_part
from glasshouse.jobs.define.raw_job import of_package
from glasshouse.jobs.define.seal_job import seal
from glasshouse.jobs.owner import home as files
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.installation import install_command
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.supervise.machine_check import check_machine
from glasshouse.package.read import Package
from glasshouse.providers.place.local import LocalPlace
from glasshouse.wire.canonical import Json

CANARY = b"patient 4711 has a canary"


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.generate()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path / "home").make()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "rows.csv").write_bytes(CANARY * 2000)
    text = """
    workload = "script"
    [inputs]
    "train.py" = "train.py"
    "data/rows.csv" = "rows.csv"
    [params]
    script = "train.py"
    [policy]
    assurance = "software"
    profile = "strict"
    lease = "5m"
    """
    return parse(text.encode(), folder=tmp_path, default_name="job")


@contextmanager
def little_room(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sealed_job(job: Job, home: Home, identity: Identity) -> Sealed:
    return seal(job, out=home.path / "job.sealed", home=home, identity=identity)


def test_a_sealed_job_opens_for_its_owner_and_shows_nothing_else(
    job: Job, home: Home, identity: Identity, tmp_path: Path
) -> None:
    sealed = sealed_job(job, home, identity)
    data = sealed.path.read_bytes()
    for secret in (CANARY, b"rows.csv", b"train.py", b"hello"):
        assert secret not in data
    manifest, _envelope = public_part(sealed.path, owner_signing=identity.signing.public)
    assert manifest == sealed.manifest
    assert manifest.floor == job.floor
    assert manifest.recipients == (identity.sealing.public,)
    plain = of_package(sealed.path, home=home, identity=identity)
    assert plain.params == {"script": "train.py"}
    (tmp_path / "plain").mkdir()
    plain.lay(tmp_path / "plain")
    assert (tmp_path / "plain" / "data" / "rows.csv").read_bytes() == CANARY * 2000


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are listed by Linux alone")
def test_a_package_that_does_not_open_in_the_clear_is_closed_again(job: Job, home: Home, identity: Identity) -> None:
    sealed = sealed_job(job, home, identity)
    with pytest.raises(GlasshouseError) as caught:
        of_package(sealed.path, home=home, identity=Identity.generate())
    assert sealed.path not in [one.resolve() for one in Path("/proc/self/fd").iterdir()], caught.value


def test_label_and_deployment_stay_on_the_owners_side(job: Job, home: Home, identity: Identity) -> None:
    sealed = sealed_job(replace(job, name="ward seven"), home, identity)
    record = PackageRecord.load(home, sealed.manifest.package_id, workload="script")
    assert (record.name, record.deployment.lease_s) == ("ward seven", 300)
    assert b"ward seven" not in sealed.path.read_bytes()


def test_a_backup_recipient_opens_the_key_and_gets_the_outputs(
    job: Job, home: Home, identity: Identity, tmp_path: Path
) -> None:
    backup = Identity.generate()
    (tmp_path / "backup.pub").write_bytes(backup.public.encode())
    sealed = sealed_job(replace(job, backups=(tmp_path / "backup.pub",)), home, identity)
    assert sealed.manifest.recipients == (identity.sealing.public, backup.sealing.public)
    keys = [
        KeyStore(home.keys).get(sealed.manifest.package_id, manifest_sha256=sealed.manifest.sha256, sealing=who.sealing)
        for who in (identity, backup)
    ]
    assert keys[0] == keys[1]


def test_a_disk_that_is_full_leaves_no_package_no_key_and_no_record(job: Job, home: Home, identity: Identity) -> None:
    with little_room(20000), pytest.raises(GlasshouseError) as full:
        sealed_job(job, home, identity)
    assert full.value.code is Code.DISK_FULL
    assert not (home.path / "job.sealed").exists()
    assert sorted(path.name for path in home.path.iterdir()) == [".gitignore", "broker", "keys", "packages", "runs"]
    assert not list(home.keys.iterdir())
    assert not list(home.packages.iterdir())


def test_a_record_that_cannot_be_kept_leaves_neither_package_nor_key(job: Job, home: Home, identity: Identity) -> None:
    """Once the package had its name before this failed, and the key was taken away from under it."""
    home.packages.rmdir()
    home.packages.write_text("in the way")
    with pytest.raises(UsageError):
        sealed_job(job, home, identity)
    assert not (home.path / "job.sealed").exists()
    assert not list(home.keys.iterdir())


@pytest.mark.parametrize("replaced", [False, True])
def test_what_fails_once_the_package_has_its_name_leaves_it_its_key(
    job: Job, home: Home, identity: Identity, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    out = home.path / "job.sealed"
    if replaced:
        sealed_job(job, home, identity)

    def fail(folder: Path) -> None:
        if folder == out.parent:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "_sync_folder", fail)
    with pytest.raises(UsageError):
        seal(job, out=out, home=home, identity=identity, replace=replaced)
    manifest, _envelope = public_part(out)
    assert KeyStore(home.keys).get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing), (
        "the package that stands there can be opened"
    )


def test_an_existing_package_is_kept_unless_told_otherwise(job: Job, home: Home, identity: Identity) -> None:
    first = sealed_job(job, home, identity)
    before = first.path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        sealed_job(job, home, identity)
    assert first.path.read_bytes() == before
    assert len(list(home.keys.iterdir())) == 1
    again = seal(job, out=first.path, home=home, identity=identity, replace=True)
    assert again.manifest.package_id != first.manifest.package_id


def test_a_file_that_changes_while_it_is_sealed_leaves_nothing(
    job: Job, home: Home, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glasshouse.jobs.define import seal_job as room

    def gather_then_change(*arguments: object, **options: object) -> object:
        sources = gather(*arguments, **options)
        (tmp_path / "rows.csv").write_bytes(b"other")
        return sources

    gather = room.gather
    monkeypatch.setattr(room, "gather", gather_then_change)
    with pytest.raises(UsageError) as changed:
        sealed_job(job, home, identity)
    assert changed.value.code is Code.SOURCE_CHANGED
    assert not (home.path / "job.sealed").exists()
    assert not list(home.keys.iterdir())


@pytest.mark.parametrize(
    ("workload", "params", "key"),
    [
        ("script", {"script": "other.py"}, "params.script"),
        ("mlp", {"data": "absent.csv"}, "params.data"),
        ("lora", {"model": "config:qwen2-tiny", "data": "absent.jsonl"}, "[params] names the records 'absent.jsonl'"),
        ("lora", {"model": "inputs:weights", "data": "data/rows.csv"}, "params.model"),
    ],
)
def test_a_parameter_that_names_no_input_is_found_here_and_not_on_a_rented_machine(
    job: Job, home: Home, identity: Identity, workload: str, params: dict[str, str], key: str
) -> None:
    with pytest.raises(UsageError) as refused:
        sealed_job(replace(job, workload=workload, params=params), home, identity)
    assert key in refused.value.message


def test_a_package_of_another_owner_is_refused(job: Job, home: Home, identity: Identity) -> None:
    sealed = sealed_job(job, home, identity)
    with pytest.raises(GlasshouseError) as refused:
        public_part(sealed.path, owner_signing=Identity.generate().signing.public)
    assert refused.value.code is Code.PACKAGE_OWNER


def unsealed(sealed: Sealed, home: Home, identity: Identity) -> tuple[str, dict[str, Json], list[str]]:
    manifest = sealed.manifest
    key = KeyStore(home.keys).get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing)
    with sealed.path.open("rb") as stream:
        index = Package.open(stream, owner_signing=identity.signing.public).unlock(key)
    return manifest.workload, index.job, [asset.path for asset in index.assets]


def machine_checked(job: Job, home: Home, identity: Identity) -> None:
    """Seal a job, and have the machine looked at as `run` does before the broker is asked for anything."""
    check_machine(*unsealed(sealed_job(job, home, identity), home, identity))


class Lab(LocalPlace):
    """Another machine, with what is installed there."""

    name = "lab"

    def __init__(self, there: dict[str, str]) -> None:
        self.there = there

    def installed(self) -> dict[str, str]:  # type: ignore[override]
        return self.there


def test_a_job_whose_records_are_a_table_requires_what_reads_it() -> None:
    there = dict.fromkeys(("torch", "transformers", "peft", "safetensors"), "9")
    params: dict[str, Json] = {"model": "config:qwen2-tiny", "data": "chats"}
    names = ["chats/data-00000-of-00001.arrow", "chats/state.json"]
    with pytest.raises(UsageError, match="lab lacks what the job requires: pyarrow>=19 is not installed") as refused:
        check_machine("lora", params, names, Lab(there))
    assert "or write the records as JSON, one object a line and seal" in refused.value.hint
    check_machine("lora", params, names, Lab(there | {"pyarrow": "19.0"}))
    check_machine("lora", params | {"data": "chats.jsonl"}, ["chats.jsonl"], Lab(there))


@pytest.mark.parametrize(
    ("workload", "params", "there", "said"),
    [
        ("mlp", {"epochs": 1}, {}, "lab lacks what mlp trains with: torch"),
        ("mlp", {"epochs": 1, "device": "cuda"}, {"torch": "2.9.0"}, "has no NVIDIA driver"),
        ("mlp", {"epochs": 1}, {"torch": "2.9.0+cu128", "nvidia-driver": "470.1"}, "takes driver 525 or newer"),
    ],
)
def test_another_machine_says_what_it_has_and_is_not_told_what_the_job_needs(
    job: Job, home: Home, identity: Identity, workload: str, params: dict[str, object], there: dict[str, str], said: str
) -> None:
    sealed = sealed_job(replace(job, workload=workload, params=params), home, identity)
    with pytest.raises(UsageError, match=said) as refused:
        check_machine(*unsealed(sealed, home, identity), Lab(there))
    assert refused.value.code in (Code.REQUIREMENT_MISSING, Code.DEVICE_MISSING)
    assert refused.value.hint


def test_a_machine_that_lacks_a_framework_is_refused_before_the_key_is_released(
    job: Job, home: Home, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    machine_checked(job, home, identity)  # a script may do without
    sealed = home.path / "job.sealed"
    sealed.unlink()
    with pytest.raises(UsageError) as refused:
        machine_checked(replace(job, workload="mlp", params={"epochs": 1}), home, identity)
    assert refused.value.code is Code.REQUIREMENT_MISSING
    assert refused.value.message == "this machine lacks what mlp trains with: torch"
    assert refused.value.hint == install_command()


def test_a_machine_that_lacks_a_requirement_is_refused_before_the_key_is_released(
    job: Job, home: Home, identity: Identity
) -> None:
    params = dict(job.params) | {"requirements": ["no-such-dist>=1", "cryptography>=1"]}
    with pytest.raises(UsageError, match="no-such-dist>=1 is not installed") as refused:
        machine_checked(replace(job, params=params), home, identity)
    assert "cryptography" not in refused.value.message


def test_what_is_wrong_inside_the_files_is_refused_before_anything_is_written(
    job: Job, home: Home, identity: Identity
) -> None:
    (job.folder / "train.py").write_text("def\n")
    with pytest.raises(UsageError, match=r"train.py line 1: invalid syntax"):
        sealed_job(job, home, identity)
    assert list(home.keys.iterdir()) == []
    (job.folder / "train.py").write_text("pass\n")
    (job.folder / "rows.py").write_text("print 'old'\n")
    assert sealed_job(replace(job, inputs={**job.inputs, "rows.py": "rows.py"}), home, identity).notes
