"""How an owner's state is recognised, by names and by what key files hold.

Sealing keeps it out of packages, the runtime out of a worker's sight, before anything else is imported.
"""

from __future__ import annotations

# How much of a file is searched: more than a key file is long, and where a broker's database names its tables.
LOOKED_AT_BYTES = 1 << 18

PROJECT = ".glasshouse"  # a project's state folder
# That folder, and the keys of an owner and of a broker wherever they are kept.
NAMES = frozenset((PROJECT, "broker.key", "owner.key"))
KEY_FOLDERS = ("keys", "broker/data")  # where else in a home keys lie, under any name

# A word that each file of its kind holds, the pattern it then has to match, and what it is. Quotes may stand behind
# backslashes: in a notebook, a key's JSON is a text in another JSON.
_KINDS = (
    (b"glasshouse-owner-private", rb'"kind\\*"\s*:\s*\\*"glasshouse-owner-private\\*"', "an owner's private keys"),
    (b"glasshouse-package-key", rb'"kind\\*"\s*:\s*\\*"glasshouse-package-key\\*"', "the key of a package"),
    (b"glasshouse-broker-key-v1", rb"glasshouse-broker-key-v1 [\w=+/-]{43}", "a broker's key"),
    (b"launch_seed", rb'"launch_seed\\*"\s*:\s*\\*"[\w=+/-]{43}', "a launch file with its key"),
    (b"wrapped_seed", rb"\ASQLite format 3\x00[\s\S]*CREATE TABLE", "a broker's database"),
)
_BEGINNINGS = (b"{", b"glasshouse-broker-key-v1 ", b"SQLite format 3\x00")


def key_kind(data: bytes) -> str | None:
    """Return what key file of ours a file is or holds, by its first `LOOKED_AT_BYTES`; None for anything else."""
    for word, pattern, kind in _KINDS:
        if word in data:
            import re

            if re.search(pattern, data):
                return kind
    return None


def is_key(data: bytes) -> bool:
    """Return whether a file, by its first bytes, is a key file of ours, and no script that merely holds one's text."""
    return data.startswith(_BEGINNINGS) and key_kind(data) is not None


def is_run_record(path: str) -> bool:
    """Return whether a file's path is that of a run's record in a state home."""
    *_, runs, run, name = ("", "", *path.split("/"))
    return runs == "runs" and name == "run.json" and len(run) == 32 and set(run) <= set("0123456789abcdef")
