"""Cases of public hardware evidence: `tests/vectors/hardware/cases.json`, and where their files are.

Each case is `{"name", "kind", "file" | "files": {ROLE: PATH}, "time", "policy", "expect", "note"}`, and where it needs
them `"collateral": {ITEM: PATH}`, `"bound": HEX` (user data that the evidence carries; what it means is the kind's),
`"every_byte": ROLE` (of an accepted case: no flipped, cut or longer form of that file is accepted), `"edit"`. `file` is
the role `evidence`. A path is below GLASSHOUSE_TEST_DATA/hardware, which is no part of this repository, or below
`tests/vectors/hardware`. `edit` is `[[ROLE, OFFSET, HEX], …]`: bytes that are replaced before the case is appraised.

A kind's own half is `tools.hardware_kinds.KIND_case` with

    def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> object

which makes the blob of these files and appraises it at `case.now_us` by `case.policy`, with the vendors' pinned roots;
it raises `CheckFailedError`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code

FOLDER = Path(__file__).resolve().parents[1] / "vectors" / "hardware"
_REQUIRED = {"name", "kind", "time", "policy", "expect", "note"}
_OPTIONAL = {"file", "files", "collateral", "bound", "every_byte", "edit"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareCase:
    """A file, a time and a policy, and what a right verifier makes of them."""

    name: str
    kind: str  # of `levels.KINDS`
    paths: Mapping[str, str]  # of files, by role
    now_us: int
    policy: HardwarePolicy
    expect: Code | None  # of the refusal; None for what is accepted
    note: str
    collateral: Mapping[str, str] = field(default_factory=dict)  # paths, by the name of the item
    bound: bytes | None = None
    every_byte: str | None = None
    edits: tuple[tuple[str, int, bytes], ...] = ()

    @classmethod
    def of(cls, value: dict[str, Any]) -> HardwareCase:
        """Read a case; an unknown or missing member is an error."""
        names = set(value)
        assert _REQUIRED <= names <= _REQUIRED | _OPTIONAL, f"{value.get('name')}: {sorted(names ^ _REQUIRED)}"
        assert ("file" in names) != ("files" in names), value["name"]
        return cls(
            name=value["name"],
            kind=value["kind"],
            paths={"evidence": value["file"]} if "file" in value else value["files"],
            now_us=int(datetime.fromisoformat(value["time"]).timestamp()) * 1_000_000,
            policy=HardwarePolicy.from_json(value["policy"]),
            expect=None if value["expect"] is None else Code(value["expect"]),
            note=value["note"],
            collateral=value.get("collateral", {}),
            bound=bytes.fromhex(value["bound"]) if "bound" in value else None,
            every_byte=value.get("every_byte"),
            edits=tuple((role, at, bytes.fromhex(new)) for role, at, new in value.get("edit", ())),
        )

    def files(self) -> dict[str, bytes]:
        """Return its files by role, edited; skips the test where one is not on this machine."""
        files = {role: _read(path) for role, path in self.paths.items()}
        for role, at, new in self.edits:
            data = files[role]
            assert at + len(new) <= len(data), f"{self.name} edits behind the end of {role}"
            files[role] = data[:at] + new + data[at + len(new) :]
        return files

    def pack(self) -> Pack:
        """Return its collateral; skips the test where a file is not on this machine."""
        return Pack(items=tuple(Item(name=name, data=_read(self.collateral[name])) for name in sorted(self.collateral)))

    def appraise(self, files: Mapping[str, bytes], pack: Pack) -> object:
        """Appraise these files as the case's; raises `CheckFailedError`."""
        name = self.kind.replace("-", "_")
        module = importlib.import_module(f"tools.hardware_kinds.{name}_case")
        half: Callable[[HardwareCase, Mapping[str, bytes], Pack], object] = module.appraise_public
        return half(self, files, pack)


def hardware_cases() -> list[HardwareCase]:
    """Return all cases."""
    return [HardwareCase.of(value) for value in json.loads((FOLDER / "cases.json").read_bytes())]


def accepted_alterations(case: HardwareCase, step: int) -> list[str]:
    """Return which altered forms of a case's file are accepted; what ends in anything but a refusal is raised.

    Args:
        step: of the file every so manieth byte.
    """
    assert case.every_byte is not None, case.name
    assert case.expect is None, case.name
    files, pack = case.files(), case.pack()
    accepted = []
    for what, data in _altered(files[case.every_byte], step):
        with contextlib.suppress(CheckFailedError):
            case.appraise({**files, case.every_byte: data}, pack)
            accepted.append(what)
    return accepted


def _altered(data: bytes, step: int) -> Iterator[tuple[str, bytes]]:
    for at in range(0, len(data), step):
        yield f"a flipped bit of byte {at}", data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        yield f"{at} bytes of it", data[:at]
    yield "one byte more", data + b"\x00"


def _read(path: str) -> bytes:
    shared = Path(os.environ.get("GLASSHOUSE_TEST_DATA", "/nonexistent")) / "hardware" / path
    for place in (FOLDER / path, shared):
        if place.is_file():
            return place.read_bytes()
    pytest.skip(f"this machine does not have hardware/{path} (GLASSHOUSE_TEST_DATA)")
