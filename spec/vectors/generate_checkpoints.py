"""Writes spec/vectors/checkpoints/ again: one file, one case, of lines and their checkpoints.

Run: python spec/vectors/generate_checkpoints.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "checkpoints"
MESSAGES = FOLDER / "fixed" / "hpke-messages.json"
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "tests")]

from checkpoint_cases import gate_rules, lines, parts, statements  # noqa: E402 - found through the line above
from package_parts import Messages  # noqa: E402


def build(messages: Messages) -> dict[str, bytes]:
    """Return every file's name and content."""
    generators = (
        parts.resume_key_cases(),
        parts.padded_cases(),
        parts.part_cases(messages),
        parts.header_cases(messages),
        statements.statement_cases(),
        gate_rules.count_cases(),
        gate_rules.launch_cases(),
        lines.line_cases(),
    )
    files: dict[str, bytes] = {}
    for name, document in (found for generator in generators for found in generator):
        if name in files:
            raise ValueError(f"two vectors with the name {name}")
        files[name] = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    return files


def kept() -> Messages:
    """Return the HPKE messages that were made before: a new one would be another."""
    return Messages(json.loads(MESSAGES.read_text()) if MESSAGES.exists() else {})


def main() -> None:
    messages = kept()
    files = build(messages)
    MESSAGES.parent.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    MESSAGES.write_text(json.dumps(messages.used, indent=1, sort_keys=True) + "\n")
    print(f"{len(files)} vectors in {FOLDER.relative_to(_HERE.parents[1])}")


if __name__ == "__main__":
    main()
