"""Installations that an owner accepts: recorded file by file, named in a job, and what a machine says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.measurements.measured import PARTS, Measured, References
from glasshouse.attestation.measurements.measurement import measured_files
from glasshouse.errors import Code, GlasshouseError, PeerError, RefusedError, UsageError
from glasshouse.jobs.define.package_records import PackageRecord
from glasshouse.jobs.define.wanted import Deployment
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.references.known_references import (
    THIS,
    Difference,
    Files,
    accepted,
    add_reference,
    check_places,
    differences,
    known_references,
    reference,
    remove_reference,
)
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.providers.place.ways import SshHost
from glasshouse.wire.canonical import Json


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path)


def files_like_ours(**changes: dict[str, bytes | None]) -> Files:
    """Return this installation's files, some of them changed; None takes one away."""
    found = {part: dict(files) for part, files in measured_files().items()}
    for part, files in changes.items():
        for name, digest in files.items():
            found[part].pop(name, None)
            if digest is not None:
                found[part][name] = digest
    return found


class Told(SshPlace):
    """A machine that says what a test tells it to."""

    def __init__(self, files: Files, *, parts: Json = None, name: str = "lab") -> None:
        super().__init__(name, SshHost(host="nowhere"), "python3", "-", connect=lambda: pytest.fail("nobody calls"))
        self._files, self._parts = files, parts

    def measurement(self) -> Json:
        return self._parts or Measured.of(self._files).to_json()

    def measured_files(self) -> dict[str, bytes]:
        return {f"{part}/{name}": digest for part, files in self._files.items() for name, digest in files.items()}


def refusal(home: Home, place: SshPlace, *names: str) -> GlasshouseError:
    with (
        pytest.raises(GlasshouseError) as refused,
        check_places(home, [place, place], accepted(home, names), names) as check,
    ):
        check()
    return refused.value


OTHER = {"stdlib/os.py": bytes(32), "stdlib/evil.py": bytes(32), "stdlib/glob.py": None}


def test_a_recorded_installation_is_read_back_and_forgotten(home: Home) -> None:
    assert known_references(home) == {}
    other = files_like_ours(interpreter=OTHER)
    add_reference(home, "lab", other)
    with pytest.raises(UsageError, match="exists already"):
        add_reference(home, "lab", other)
    assert known_references(home) == {"lab": other}
    assert (home.references / "lab.json").stat().st_mode & 0o777 == 0o600
    remove_reference(home, "lab")
    assert known_references(home) == {}
    with pytest.raises(UsageError, match="no reference is called 'lab'"):
        reference(home, "lab")


@pytest.mark.parametrize("name", ["", THIS, "../lab", "-lab", ".lab", "a" * 65, "lab\n"])
def test_a_name_that_is_none_is_refused(home: Home, name: str) -> None:
    with pytest.raises(UsageError):
        add_reference(home, name, measured_files())
    if name != THIS:
        with pytest.raises(UsageError):
            reference(home, name)
    with pytest.raises(UsageError):
        remove_reference(home, name)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"glasshouse": []}', b"[1]"])
def test_a_damaged_record_accepts_nothing(home: Home, damage: bytes) -> None:
    add_reference(home, "lab", measured_files())
    (home.references / "lab.json").write_bytes(damage)
    for use in (lambda: accepted(home, ["lab"]), lambda: known_references(home)):
        with pytest.raises(UsageError, match="damaged"):
            use()


def test_a_job_accepts_what_it_names_and_without_a_name_this_installation_alone(home: Home) -> None:
    ours, other = measured_files(), files_like_ours(interpreter=OTHER)
    add_reference(home, "lab", other)
    assert accepted(home, []) == accepted(home, [THIS]) == References.of(Measured.of(ours))
    assert accepted(home, ["lab"]) == References.of(Measured.of(other))
    both = accepted(home, [THIS, "lab"])
    assert both.unknown(Measured.of(ours)) is both.unknown(Measured.of(other)) is None
    assert accepted(home, ["lab"]).unknown(Measured.of(ours)) == "interpreter"
    with pytest.raises(UsageError):
        accepted(home, [THIS, "nowhere"])


def test_the_names_stay_with_the_package(home: Home) -> None:
    (home.packages).mkdir()
    record = PackageRecord(package_id="ab" * 16, name="n", workload="mlp", deployment=Deployment(reference=("lab",)))
    record.save(home)
    assert PackageRecord.load(home, "ab" * 16, workload="mlp") == record


def test_differences_are_told_file_by_file() -> None:
    there = files_like_ours(interpreter=OTHER)
    assert differences(there, measured_files()) == [
        Difference(part="interpreter", name="stdlib/evil.py", how="more"),
        Difference(part="interpreter", name="stdlib/glob.py", how="missing"),
        Difference(part="interpreter", name="stdlib/os.py", how="changed"),
    ]
    assert differences(there, there) == []


def test_a_machine_that_measures_otherwise_is_refused_by_part_and_file(home: Home) -> None:
    refused = refusal(home, Told(files_like_ours(interpreter=OTHER)))
    assert isinstance(refused, RefusedError)
    assert refused.code is Code.MEASUREMENT_UNKNOWN
    for told in ("lab has another interpreter", "reference this", "3 files", "evil.py (more)", "nothing was released"):
        assert told in refused.message
    assert "glasshouse measure --on lab --diff this" in refused.hint


def test_a_rented_machine_that_was_given_back_is_not_to_be_asked_again(home: Home) -> None:
    refused = refusal(home, Told(files_like_ours(interpreter=OTHER), name="runpod:4798f41d"))
    assert refused.code is Code.MEASUREMENT_UNKNOWN
    assert "glasshouse reference add NAME --tree DIR" in refused.hint
    assert "runpod:4798f41d" not in refused.hint


def test_a_machine_is_compared_with_the_nearest_reference_and_one_that_is_recorded_passes(home: Home) -> None:
    other = files_like_ours(interpreter=OTHER)
    add_reference(home, "far", files_like_ours(interpreter=OTHER | {"stdlib/re.py": bytes(32), "python": bytes(32)}))
    add_reference(home, "near", files_like_ours(interpreter=OTHER | {"python": bytes(32)}))
    assert "reference near: 1 files differ, python (changed)" in refusal(home, Told(other), "far", "near").message
    add_reference(home, "lab", other)
    with check_places(home, [Told(other)], accepted(home, ["lab"]), ["lab"]) as check:
        check()


def test_this_machine_is_compared_too_where_a_job_names_another(home: Home) -> None:
    from glasshouse.providers.place.local import LocalPlace

    add_reference(home, "lab", files_like_ours(glasshouse={"glasshouse/errors.py": bytes(32)}))
    names = ["lab"]
    with (
        pytest.raises(RefusedError, match="local has another glasshouse"),
        check_places(home, [LocalPlace()], accepted(home, names), names) as check,
    ):
        check()


LIES: list[tuple[str, Callable[[Files], dict[str, Any]]]] = [
    ("no parts", lambda files: {"parts": {"glasshouse": "00" * 32}}),
    ("no measurement", lambda files: {"parts": [1]}),
    ("a part more", lambda files: {"parts": Measured.of(files).to_json() | {"torch": "00" * 32}}),
]


@pytest.mark.parametrize(("what", "lie"), LIES, ids=[what for what, _ in LIES])
def test_an_answer_that_is_none_is_the_machines_fault(home: Home, what: str, lie: Any) -> None:
    assert isinstance(refusal(home, Told(measured_files(), **lie(measured_files()))), PeerError)


def test_files_of_no_part_are_the_machines_fault(home: Home) -> None:
    there = files_like_ours(interpreter=OTHER) | {"torch": {"x.py": bytes(32)}}
    honest = Measured.of({part: there[part] for part in PARTS}).to_json()
    assert isinstance(refusal(home, Told(there, parts=honest)), PeerError)
