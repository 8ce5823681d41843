"""What can be done to a measurement's folder, by a stranger and by its owner: told by the tests of `verify`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glasshouse.bench.overhead.verdict import MeasurementVerdict
from glasshouse.bench.overhead.verify import verify_measurement
from glasshouse.errors import VerificationError
from glasshouse.wire.canonical import encode
from glasshouse.wire.kdf import sha256
from simulators.measurement import OWNER, edit_lines, edit_statement, reseal
from simulators.world import World

__all__ = ["ATTACKS", "Attack", "drop_session", "measured", "refusal", "said", "sign_as_it_is", "verified"]


@dataclass(frozen=True)
class Attack:
    """What was done to the folder, and what the owner's own key makes of it.

    Attributes:
        told: in words.
        forge: does it; is also given another measurement by the same owner.
        left_to_the_owner: the owner who signs again is believed, as nothing contradicts them; section 13 says so.
        sign: how the owner signs again: what was computed anew, or what was edited.
    """

    told: str
    forge: Callable[[Path, Path], None]
    left_to_the_owner: bool = False
    sign: Callable[[Path], None] = reseal


def sign_as_it_is(folder: Path) -> None:
    edit_statement(folder, lambda _: None, key=OWNER)


def slices(change: Callable[[list[dict[str, Any]]], object], part: str = "interleaved") -> Callable[[Path, Path], None]:
    return lambda folder, _: edit_lines(folder / part / "slices.jsonl", change)


def notes(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path, Path], None]:
    return lambda folder, _: edit_lines(folder / "interleaved/sessions.jsonl", change)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(encode(value))


def said(told: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    """The numbers are changed where they stand: in the analysis and in the statement."""

    def forge(folder: Path, _: Path) -> None:
        edit_json(folder / "interleaved/analysis.json", change)
        digest = sha256((folder / "interleaved/analysis.json").read_bytes()).hex()

        def follow(statement: dict[str, Any]) -> None:
            part = statement["parts"][0]
            change(part)
            part["analysis_sha256"] = digest

        edit_statement(folder, follow)

    return Attack(told, forge, sign=sign_as_it_is)


def first(found: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(one for one in found if all(one.get(name) == value for name, value in wanted.items()))


def measured(found: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return first(found, phase="measured", **wanted)


def faster(found: list[dict[str, Any]]) -> None:
    for one in found:
        if one["kind"] == "slice" and one["arm"] == "P":
            one["t1_ns"] = one["t0_ns"] + (one["t1_ns"] - one["t0_ns"]) * 98 // 100


def other_arm(found: list[dict[str, Any]]) -> None:
    one = measured(found, arm="P")
    one["arm"] = "R"


def swapped_arms(found: list[dict[str, Any]]) -> None:
    for one in found:
        if one["kind"] == "slice":
            one["arm"] = "R" if one["arm"] == "P" else "P"


def drop_session(number: int) -> Callable[[Path, Path], None]:
    def forge(folder: Path, _: Path) -> None:
        for name in ("slices", "sessions"):
            edit_lines(
                folder / f"interleaved/{name}.jsonl",
                lambda found: found.__setitem__(slice(None), [one for one in found if one["session"] != number]),
            )
        (folder / f"interleaved/receipts/{number:04d}.json").unlink()

    return forge


def other_seed(folder: Path, _: Path) -> None:
    edit_json(folder / "interleaved/design.json", lambda design: design.update(seed=sha256(b"a luckier one").hex()))


def swapped_part(name: str) -> Callable[[Path, Path], None]:
    def forge(folder: Path, rival: Path) -> None:
        shutil.rmtree(folder / name)
        shutil.copytree(rival / name, folder / name)

    return forge


def swapped_receipt(folder: Path, rival: Path) -> None:
    other = (folder / "sequential/receipts/0000.json").read_bytes()
    (folder / "interleaved/receipts/0001.json").write_bytes(other)
    edit_lines(folder / "interleaved/sessions.jsonl", lambda found: found[1].update(bundle_sha256=sha256(other).hex()))


def repeated_receipt(folder: Path, _: Path) -> None:
    """One good run stands behind two sessions, with everything that it says copied too."""
    (folder / "interleaved/receipts/0001.json").write_bytes((folder / "interleaved/receipts/0000.json").read_bytes())
    edit_lines(folder / "interleaved/sessions.jsonl", lambda found: found.__setitem__(1, {**found[0], "session": 1}))


def anothers_receipt(folder: Path, _: Path) -> None:
    data = World("rival").run().data
    (folder / "interleaved/receipts/0001.json").write_bytes(data)
    edit_lines(folder / "interleaved/sessions.jsonl", lambda found: found[1].update(bundle_sha256=sha256(data).hex()))


def longer_work(found: list[dict[str, Any]]) -> None:
    for one in found:
        if one["kind"] == "slice" and one["session"] == 2:
            one["done_before"] += 10_000
            one["done_after"] += 10_000


def parity_of_the_run(found: list[dict[str, Any]]) -> None:
    found[0]["protected"]["outputs"][0]["sha256"] = "0" * 64
    found[0]["raw"]["outputs"][0]["sha256"] = "0" * 64


ATTACKS = [
    Attack("a slice is dropped", slices(lambda found: found.remove(measured(found)))),
    Attack("a block is dropped whole", slices(lambda found: [
        found.remove(one) for one in [*found] if one.get("phase") == "measured" and one["block"] == 1])),
    Attack("the time of a slice is edited",
           slices(lambda found: measured(found).update(t1_ns=measured(found)["t1_ns"] - 1_000_000)), True),
    Attack("every protected time is shortened", slices(faster), True),
    Attack("a schedule is drawn again from another seed", other_seed),
    Attack("the margin is widened after the fact", lambda folder, _: edit_json(
        folder / "interleaved/design.json", lambda design: design.update(margin_ppm=100_000)), True),
    Attack("fewer blocks were planned, it is said", lambda folder, _: edit_json(
        folder / "interleaved/design.json", lambda design: design.update(blocks_per_session=3))),
    Attack("a shorter guard was planned, it is said", lambda folder, _: edit_json(
        folder / "interleaved/design.json", lambda design: design.update(guard_steps=2))),
    Attack("a slice is moved to the other arm", slices(other_arm)),
    Attack("the arms are called by each other's names", slices(swapped_arms)),
    Attack("two slices change places", slices(lambda found: found.insert(4, found.pop(5)))),
    Attack("a slice is repeated", slices(lambda found: found.insert(6, found[5]))),
    Attack("an inconvenient block is excluded",
           slices(lambda found: measured(found, block=2).update(steal_ppm=60_000)), True),
    Attack("an excluded block is let in by saying that nobody looked",
           slices(lambda found: [one.update(steal_ppm=None) for one in found if one["kind"] == "slice"]), True),
    Attack("a session in the middle is left out", drop_session(1)),
    Attack("the last session is left out", drop_session(2), True),
    Attack("a session's end is left out",
           slices(lambda found: found.remove(first(found, kind="session", session=1)))),
    Attack("a session that was cut short is called complete", slices(lambda found: [
        found.remove(one) for one in [*found] if one.get("phase") == "measured" and one["block"] == 3])),
    Attack("fewer blocks are said to have been started",
           slices(lambda found: first(found, kind="session").update(blocks_started=3))),
    said("the word is edited", lambda part: part["claim"].update(word="equivalent")),
    said("the interval is edited", lambda part: part["result"]["interval_95"].update(low="1.00000000000e-03")),
    said("the margin of the claim is edited", lambda part: part["claim"].update(margin="5.00000000000e-02")),
    said("failed attempts are edited away", lambda part: part["attempts"].update(blocks_started=11)),
    said("the lifecycle is edited where it stands", lambda part: part["lifecycle"].update(seconds="1.00000000000e-03")),
    said("the cost of a job is edited", lambda part: part["jobs"][0].update(extra_s="0.00000000000e+00")),
    said("parity is claimed", lambda part: part["parity"].update(word="different")),
    Attack("the lifecycle of a session is edited",
           notes(lambda found: found[0]["lifecycle_us"].update(attest=1))),
    Attack("a step of the lifecycle was not reached, it is said",
           notes(lambda found: found[0]["lifecycle_us"].update(attest=None))),
    Attack("the weights of the protected run are edited", notes(parity_of_the_run)),
    Attack("the weights of the raw run are edited",
           notes(lambda found: found[0]["raw"]["outputs"][0].update(hmac_sha256="0" * 64)), True),
    Attack("the protected run did more, it is said", notes(lambda found: found[0]["protected"].update(done=10**6))),
    Attack("a completed run is said to have failed", notes(lambda found: found[0].update(protected=None))),
    Attack("a note is left out", notes(lambda found: found.pop())),
    Attack("two notes change places", notes(lambda found: found.insert(0, found.pop(1)))),
    Attack("slices of more steps than the run ever did", slices(longer_work)),
    Attack("the null run is swapped for another one", swapped_part("null"), True),
    Attack("the interleaved part is swapped for another one", swapped_part("interleaved"), True),
    Attack("a receipt is swapped for that of another session", swapped_receipt),
    Attack("a receipt stands behind two sessions", repeated_receipt),
    Attack("a receipt of another owner's run", anothers_receipt),
    Attack("a receipt is taken away", lambda folder, _: (folder / "interleaved/receipts/0001.json").unlink()),
    Attack("a receipt is added",
           lambda folder, _: shutil.copy(folder / "interleaved/receipts/0001.json",
                                         folder / "interleaved/receipts/0007.json") and None),
    Attack("a phase slice is edited", lambda folder, _: edit_lines(
        folder / "phases.jsonl", lambda found: found[0]["phases"].update(forward=1)), True),
    Attack("the phases' numbers are edited", lambda folder, _: edit_json(
        folder / "phases.json", lambda value: value["bound"].update(word="gpu")), True),
    Attack("a phase slice is dropped", lambda folder, _: edit_lines(
        folder / "phases.jsonl", lambda found: found.pop()), True),
]  # fmt: skip


def verified(folder: Path) -> MeasurementVerdict:
    return verify_measurement(folder, owner=OWNER.public)


def refusal(folder: Path, owner: bytes = OWNER.public) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify_measurement(folder, owner=owner)
    return caught.value
