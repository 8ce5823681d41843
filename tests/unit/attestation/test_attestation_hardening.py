"""What a profile demands, and when a report bears out what it claims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glasshouse.attestation.claims import (
    CHECKS,
    REQUIRED,
    CheckResult,
    HardeningReport,
    SecretMemoryKind,
    WorkspaceKind,
    anti_debug,
    consistent,
    missing,
)
from glasshouse.errors import Code, FormatError
from glasshouse.wire.policy import Profile
from simulators.key_release_world import FAILED, UNAVAILABLE, answers, report


def test_a_stronger_profile_demands_everything_that_a_weaker_one_does() -> None:
    for process in ("agent", "worker"):
        assert REQUIRED[Profile.OFF][process] == frozenset()
        assert REQUIRED[Profile.STANDARD][process] < REQUIRED[Profile.STRICT][process] == CHECKS[process]


@pytest.mark.parametrize("process", ["agent", "worker"])
@pytest.mark.parametrize("result", [FAILED, UNAVAILABLE])
def test_every_check_counts_in_the_profiles_that_name_it(process: str, result: CheckResult) -> None:
    for name in CHECKS["agent" if process == "agent" else "worker"]:
        changed = replace(report(), **{process: answers(process, **{name: result})})
        for profile in (Profile.STANDARD, Profile.STRICT):
            named = name in REQUIRED[profile]["agent" if process == "agent" else "worker"]
            assert missing(changed, profile) == ([f"{process}.{name}"] if named else [])


def test_a_check_that_the_kernel_does_not_offer_has_not_passed() -> None:
    no_landlock = report(profile=Profile.STRICT, worker=answers("worker", landlock=UNAVAILABLE))
    assert missing(no_landlock, Profile.STRICT) == ["worker.landlock"]
    assert not consistent(no_landlock)
    assert consistent(replace(no_landlock, profile=Profile.STANDARD))


@pytest.mark.parametrize("check", ["not_dumpable", "not_traced", "watched"])
@pytest.mark.parametrize("process", ["agent", "worker"])
def test_anti_debug_needs_both_processes(check: str, process: str) -> None:
    assert anti_debug(answers("agent"), answers("worker"))
    agent = answers("agent", **({check: FAILED} if process == "agent" else {}))
    worker = answers("worker", **({check: FAILED} if process == "worker" else {}))
    assert not anti_debug(agent, worker)
    assert not consistent(report(profile=Profile.OFF, agent=agent, worker=worker, anti_debug=True))
    assert consistent(report(profile=Profile.OFF, agent=agent, worker=worker, anti_debug=False))


def test_a_report_that_denies_the_anti_debug_it_has_is_not_consistent() -> None:
    assert not consistent(report(anti_debug=False))


def test_a_directory_is_not_memory_and_locked_memory_is_not_secret() -> None:
    assert not consistent(report(workspace=WorkspaceKind.DIRECTORY))
    assert not consistent(report(secret_memory=SecretMemoryKind.LOCKED))
    honest = report(
        workspace=WorkspaceKind.DIRECTORY,
        secret_memory=SecretMemoryKind.LOCKED,
        agent=answers("agent", secret_memory=UNAVAILABLE),
        worker=answers("worker", secret_memory=UNAVAILABLE, workspace_in_memory=FAILED),
    )
    assert consistent(honest)  # standard goes on with less, and says so
    assert not consistent(replace(honest, profile=Profile.STRICT))


def test_every_check_has_an_answer_and_there_is_no_other() -> None:
    for wrong in (answers("agent", bribed=CheckResult.PASSED), {"watched": CheckResult.PASSED}, {}):
        with pytest.raises(FormatError) as refusal:
            report(agent=wrong)
        assert refusal.value.code is Code.SCHEMA


@pytest.mark.parametrize(
    "details",
    [{"note": "free text here"}, {"a b": 1}, {f"n{number}": number for number in range(33)}],
    ids=["text", "name", "many"],
)
def test_details_are_no_place_for_free_text(details: dict[str, str | int]) -> None:
    with pytest.raises(FormatError):
        report(details=details)


def test_a_report_survives_its_encoding() -> None:
    for one in (report(), report(profile=Profile.OFF, anti_debug=False, details={})):
        assert HardeningReport.from_json(one.to_json()) == one


@pytest.mark.parametrize("name", ["agent", "anti_debug", "details", "profile", "secret_memory", "worker", "workspace"])
def test_a_report_without_one_of_its_parts_is_refused(name: str) -> None:
    value = {key: part for key, part in report().to_json().items() if key != name}
    with pytest.raises(FormatError):
        HardeningReport.from_json(value)


@pytest.mark.parametrize("value", [None, [], {"x": True}, {"x": None}, {"x": [1]}, {"x": {"y": 1}}])
def test_details_of_another_shape(value: object) -> None:
    with pytest.raises(FormatError):
        HardeningReport.from_json({**report().to_json(), "details": value})  # type: ignore[dict-item]
