"""Write the vectors of spec/overhead-artifact.md: one file, one case, on a small measurement of a simulated machine."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "overhead-artifact"
sys.path.insert(0, str(_HERE.parents[1] / "tests"))

from glasshouse.bench.overhead.design import Mode  # noqa: E402
from glasshouse.bench.overhead.statement import write_statement  # noqa: E402
from glasshouse.errors import Code  # noqa: E402
from glasshouse.wire.canonical import encode  # noqa: E402
from glasshouse.wire.fields import b64encode  # noqa: E402
from glasshouse.wire.kdf import sha256  # noqa: E402
from simulators.measurement import (  # noqa: E402 - found through the line above
    FACTS,
    OWNER,
    edit_lines,
    edit_statement,
    reseal,
    write,
)
from simulators.world import World  # noqa: E402

GOOD = "good"
NULL = Path("null")
PART = Path("interleaved")
Forge = Callable[[Path], object]


def slices(change: Callable[[list[dict[str, Any]]], object]) -> Forge:
    return lambda folder: edit_lines(folder / PART / "slices.jsonl", change)


def notes(change: Callable[[list[dict[str, Any]]], object]) -> Forge:
    return lambda folder: edit_lines(folder / PART / "sessions.jsonl", change)


def in_turn(*forges: Forge) -> Forge:
    def forge(folder: Path) -> None:
        for one in forges:
            one(folder)

    return forge


def signed(**changes: Any) -> Forge:
    return lambda folder: edit_statement(folder, lambda statement: statement.update(changes), key=OWNER)


def measured(found: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    return next(one for one in found if one.get("phase") == "measured" and one["arm"] == arm)


def other_seed(folder: Path) -> None:
    path = folder / PART / "design.json"
    path.write_bytes(encode({**json.loads(path.read_bytes()), "seed": sha256(b"a luckier seed").hex()}))


def other_word(folder: Path) -> None:
    path = folder / PART / "analysis.json"
    value = json.loads(path.read_bytes())
    value["claim"]["word"] = "equivalent"
    path.write_bytes(encode(value))

    def follow(statement: dict[str, Any]) -> None:
        statement["parts"][0]["claim"]["word"] = "equivalent"
        statement["parts"][0]["analysis_sha256"] = sha256(path.read_bytes()).hex()

    edit_statement(folder, follow, key=OWNER)


def drop_first_session(folder: Path) -> None:
    for name in ("slices", "sessions"):
        edit_lines(
            folder / PART / f"{name}.jsonl",
            lambda found: found.__setitem__(slice(None), [one for one in found if one["session"] != 0]),
        )
    (folder / PART / "receipts/0000.json").unlink()


def same_receipt_twice(folder: Path) -> None:
    first = folder / PART / "receipts/0000.json"
    (folder / PART / "receipts/0001.json").write_bytes(first.read_bytes())
    notes(lambda found: found.__setitem__(1, {**found[0], "session": 1}))(folder)


def drop_null(folder: Path) -> None:
    shutil.rmtree(folder / NULL)
    write_statement(folder, FACTS, owner=OWNER)


def no_null_result(folder: Path) -> None:
    shutil.rmtree(folder / NULL)
    edit_statement(folder, lambda statement: statement["parts"].pop(1), key=OWNER)


# (name, description, what is done, the code or what is accepted)
REFUSED = Code.ARTIFACT_INVALID.value
CASES: list[tuple[str, str, Forge, dict[str, Any]]] = [
    ("slice-dropped", "a slice is not there", slices(lambda found: found.remove(measured(found, "P"))),
     {"code": REFUSED}),
    ("slice-dropped-and-signed", "a slice is not there, and the owner signed the rest",
     in_turn(slices(lambda found: found.remove(measured(found, "P"))), reseal), {"code": REFUSED}),
    ("slices-cut", "the last line has lost its end", lambda folder: (folder / PART / "slices.jsonl").write_bytes(
        (folder / PART / "slices.jsonl").read_bytes()[:-9]), {"code": REFUSED}),
    ("time-edited", "a protected slice took a millisecond less",
     slices(lambda found: measured(found, "P").update(t1_ns=measured(found, "P")["t1_ns"] - 10**6)), {"code": REFUSED}),
    ("time-edited-and-signed", "the same, computed and signed again by its owner: accepted, as section 13 says",
     in_turn(slices(lambda found: measured(found, "P").update(t1_ns=measured(found, "P")["t1_ns"] - 10**6)), reseal),
     {"assurance": "software", "code": None, "lacks": [], "status": "good"}),
    ("arm-edited-and-signed", "a slice is given to the other arm",
     in_turn(slices(lambda found: measured(found, "P").update(arm="R")), reseal), {"code": REFUSED}),
    ("seed-edited-and-signed", "the design has another seed than the slices follow", in_turn(other_seed, reseal),
     {"code": REFUSED}),
    ("word-edited-and-signed", "the word is another one in analysis and statement", other_word, {"code": REFUSED}),
    ("session-dropped-and-signed", "the first session is left out", in_turn(drop_first_session, reseal),
     {"code": REFUSED}),
    ("session-end-dropped", "a session has no end",
     slices(lambda found: found.remove(next(one for one in found if one["kind"] == "session"))), {"code": REFUSED}),
    ("lifecycle-edited-and-signed", "a session's lifecycle is not its receipt's, and all is computed again",
     in_turn(notes(lambda found: found[0]["lifecycle_us"].update(attest=1)), reseal), {"code": REFUSED}),
    ("weights-edited-and-signed", "the protected run's weights are not its receipt's, and all is computed again",
     in_turn(notes(lambda found: found[0]["protected"]["outputs"][0].update(hmac_sha256="0" * 64)), reseal),
     {"code": REFUSED}),
    ("receipt-twice-and-signed", "one run stands behind two sessions", in_turn(same_receipt_twice, reseal),
     {"code": REFUSED}),
    ("receipt-missing", "a receipt that is named is not there",
     lambda folder: (folder / PART / "receipts/0001.json").unlink(), {"code": REFUSED}),
    ("phase-edited", "a phase took less time", lambda folder: edit_lines(
        folder / "phases.jsonl", lambda found: found[0]["phases"].update(forward=1)), {"code": REFUSED}),
    ("file-unlisted", "a file in a part that nobody signed",
     lambda folder: (folder / PART / "notes.txt").write_text("all is well"), {"code": REFUSED}),
    ("assurance-raised-and-signed", "a higher level than the receipts'", signed(assurance="gpu-tee"),
     {"code": REFUSED}),
    ("limits-dropped-and-signed", "a statement without its limits", signed(limits=[]), {"code": REFUSED}),
    ("member-unknown-and-signed", "a statement with one member more", signed(note="trust me"), {"code": REFUSED}),
    ("text-with-a-path-and-signed", "a workload whose name has a slash",
     signed(workload={**FACTS.workload, "name": "/home/ana/model"}), {"code": REFUSED}),
    ("null-left-out", "an interleaved part alone: authentic, and its word does not stand", drop_null,
     {"assurance": "software", "code": None, "lacks": ["null"], "status": "incomplete"}),
    ("null-removed-and-signed", "the null run is taken away and its result still told", no_null_result,
     {"code": REFUSED}),
]  # fmt: skip


def build() -> dict[str, bytes]:
    """Return every vector by its file name."""
    return {f"{name}.json": _encoded(value) for name, value in _cases()}


def _cases() -> Iterator[tuple[str, dict[str, Any]]]:
    owner = b64encode(OWNER.public)
    with tempfile.TemporaryDirectory() as name:
        good = Path(name) / GOOD
        write(good, modes=[Mode.INTERLEAVED, Mode.NULL], sessions=2, blocks=2, phases=2)
        base = _read(good)
        accepted = {"assurance": "software", "code": None, "lacks": [], "status": "good"}
        yield GOOD, _case("a measurement of two sessions", {"files": base, "owner": owner}, accepted)
        for story, description, forge, expect in CASES:
            folder = Path(name) / story
            shutil.copytree(good, folder)
            forge(folder)
            yield story, _case(description, {"base": GOOD, "owner": owner, **_changes(base, _read(folder))}, expect)
        stranger = b64encode(World("stranger").owner.public)
        whole = {"base": GOOD, "edits": [], "owner": stranger, "put": {}, "removed": []}
        yield "owner-other", _case("verified as another owner's", whole, {"code": Code.OWNER_UNKNOWN.value})


def _case(description: str, given: dict[str, Any], expect: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "expect": expect, "input": given}


def _read(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def _changes(base: dict[str, str], found: dict[str, str]) -> dict[str, Any]:
    edits, put = [], {}
    for path, text in found.items():
        if path not in base:
            put[path] = text
        elif text != base[path]:
            edit = _edit(base[path], text)
            if 2 * (len(edit["old"]) + len(edit["new"])) < len(text):
                edits.append({"path": path, **edit})
            else:
                put[path] = text
    return {"edits": edits, "put": put, "removed": sorted(set(base) - set(found))}


def _edit(old: str, new: str) -> dict[str, str]:
    """Return the shortest one replacement whose `old` occurs once."""
    shorter = min(len(old), len(new))
    start = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    end = next((at for at in range(shorter - start) if old[-1 - at] != new[-1 - at]), shorter - start)
    while old.count(old[start : len(old) - end]) != 1:
        start, end = max(start - 8, 0), max(end - 8, 0)
    return {"new": new[start : len(new) - end], "old": old[start : len(old) - end]}


def _encoded(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    built = build()
    for path in FOLDER.glob("*.json"):
        if path.name not in built:
            path.unlink()
    for name, data in built.items():
        (FOLDER / name).write_bytes(data)
    print(f"{len(built)} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
