"""Problem documents: what they say, what they never say, and what a client makes of them."""

from __future__ import annotations

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.broker.http_api import MAX_PROBLEM_BYTES, Problem
from glasshouse.errors import (
    Code,
    FormatError,
    GlasshouseError,
    InternalError,
    PackageError,
    PeerError,
    RefusedError,
    UsageError,
    VerificationError,
)
from glasshouse.wire.canonical import decode


@pytest.mark.parametrize("code", list(Code))
def test_every_code_survives_the_way(code: Code) -> None:
    problem = Problem(code=code, status=403, detail="why", check="11b", expected="strict", actual="standard")
    assert Problem.parse(problem.encode()) == problem
    bare = Problem(code=code, status=403, detail="why")
    assert Problem.parse(bare.encode()) == bare


def test_a_problem_is_what_rfc_9457_says_with_the_code_beside_it() -> None:
    refusal = CheckFailedError("6", Code.MANIFEST_MISMATCH, "another manifest", expected="aa", actual="bb")
    assert decode(Problem.of(refusal).encode(), max_bytes=MAX_PROBLEM_BYTES) == {
        "actual": "bb",
        "check": "6",
        "code": "manifest-mismatch",
        "detail": "check 6: another manifest",
        "expected": "aa",
        "status": 403,
        "title": "manifest mismatch",
        "type": "urn:glasshouse:problem:manifest-mismatch",
    }


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the key is 0123"), KeyError("secret"), InternalError(Code.INTERNAL, "at line 7 of the secret")],
)
def test_of_a_defect_nothing_is_said_but_that_it_is_one(error: Exception) -> None:
    problem = Problem.of(error)
    assert (problem.code, problem.status) == (Code.INTERNAL, 500)
    assert "secret" not in problem.detail
    assert "0123" not in problem.detail


@pytest.mark.parametrize(
    ("error", "status", "returned"),
    [
        (RefusedError(Code.PACKAGE_REVOKED, "x"), 403, RefusedError),
        (RefusedError(Code.NONCE_REPLAYED, "x"), 409, RefusedError),
        (RefusedError(Code.TOO_MANY_CHALLENGES, "x"), 429, RefusedError),
        (VerificationError(Code.CHAIN_DELEGATION, "x"), 403, RefusedError),
        (FormatError(Code.SCHEMA, "x"), 400, FormatError),
        (FormatError(Code.TOO_LARGE, "x"), 413, FormatError),
        (PackageError(Code.KEY_COMMITMENT, "x"), 400, FormatError),
        (UsageError(Code.USAGE, "x"), 422, UsageError),
        (UsageError(Code.RUN_UNKNOWN, "x"), 404, UsageError),
        (PeerError(Code.BROKER_UNREACHABLE, "x"), 503, PeerError),
    ],
)
def test_an_error_has_a_status_and_comes_back_as_what_it_was(
    error: GlasshouseError, status: int, returned: type[GlasshouseError]
) -> None:
    problem = Problem.parse(Problem.of(error).encode())
    assert problem.status == status
    again = problem.to_error()
    assert type(again) is returned
    assert again.code is error.code


def test_a_long_message_is_cut() -> None:
    problem = Problem.of(RefusedError(Code.USAGE, "x" * 100_000))
    assert len(problem.encode()) < 8192  # what the runtime's client reads of a problem
