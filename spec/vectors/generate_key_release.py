"""Write the vectors of spec/key-release.md: one file, one case.

Keys, ids and times are fixed, so that the same files are written again. HPKE ciphertexts are random: one that
still opens, for its key and context, is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "key-release"
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "tests")]

from key_release_cases import documents, gate, groups, legs, release, tokens  # noqa: E402 - found through the line above


def build(previous: Mapping[str, Any]) -> dict[str, bytes]:
    """Return every file's name and content.

    Args:
        previous: the committed documents by file name; their ciphertexts are kept where they still open.
    """
    generators = (
        gate.gate_cases(),
        groups.gate_cases(),
        groups.group_cases(),
        groups.ask_cases(),
        groups.pending_cases(),
        documents.request_cases(),
        documents.challenge_cases(),
        documents.delegation_cases(),
        documents.launch_cases(),
        documents.policy_cases(),
        documents.measurement_cases(),
        tokens.token_cases(),
        tokens.ear_cases(),
        legs.leg_cases(),
        release.release_cases(previous),
    )
    files: dict[str, bytes] = {}
    for name, document in (found for generator in generators for found in generator):
        if name in files:
            raise ValueError(f"two vectors with the name {name}")
        files[name] = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    return files


def committed() -> dict[str, Any]:
    return {path.name: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}


def main() -> None:
    files = build(committed())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(files)} vectors in {FOLDER.relative_to(_HERE.parents[1])}")


if __name__ == "__main__":
    main()
