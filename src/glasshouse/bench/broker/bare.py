"""What no gate can leave out, the bare cryptography of an exchange and two bare commits; how long its messages are."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from glasshouse.wire import hpke
from glasshouse.wire.signing import SigningKey, verify

__all__ = ["ANSWERS", "REQUESTS", "commits_us", "cryptography_us"]

# Bytes of the messages of an exchange: challenge request, challenge, evidence, release.
_ASKED, _CHALLENGE, _EVIDENCE, _RELEASE = 1800, 200, 6200, 3300
REQUESTS = (("/v1/challenge", _ASKED), ("/v1/evidence", _EVIDENCE))
ANSWERS = (_CHALLENGE, _RELEASE)
_ROUNDS = 200


def cryptography_us(rounds: int = _ROUNDS) -> float:
    """Return the median microseconds of what no gate can leave out.

    Two verifications of the token (once a request), one of the challenge request, two of the evidence, the
    signature of the result, and the HPKE seal of the package key. Messages have the sizes of real ones.
    """
    key, recipient = SigningKey.generate(), hpke.RecipientKey.generate().public
    token, asked, evidence = bytes(1100), bytes(_ASKED), bytes(_EVIDENCE)
    signed = [(message, key.sign(message)) for message in (token, token, asked, evidence, evidence)]
    package_key, info = bytes(32), bytes(600)

    def once() -> None:
        for message, signature in signed:
            verify(key.public, signature, message)
        key.sign(token)
        hpke.seal(package_key, recipient=recipient, info=info)

    return _median_us(once, rounds)


def commits_us(folder: Path, rounds: int = _ROUNDS) -> float:
    """Return the median microseconds of two synced SQLite commits in `folder`, of what an exchange has to remember."""
    path = folder / "commits.sqlite3"
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE kept (bytes BLOB NOT NULL)")

        def once() -> None:
            for size in (_CHALLENGE, _RELEASE):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO kept VALUES (?)", (bytes(size),))
                connection.execute("COMMIT")

        return _median_us(once, rounds)
    finally:
        connection.close()
        for file in folder.glob(f"{path.name}*"):
            file.unlink()


def _median_us(once: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6
