"""Write the vectors of spec/evidence.md: one file, one case. The same keys, the same times, the same files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "evidence"
sys.path.insert(0, str(_HERE.parents[1] / "tests"))

from glasshouse.errors import Code  # noqa: E402
from glasshouse.evidence.artifact import ARTIFACT_TYPE  # noqa: E402
from glasshouse.evidence.events import MAX_EVENTS  # noqa: E402
from glasshouse.evidence.heads import CountersignedHead, Head  # noqa: E402
from glasshouse.evidence.receipt import PROBES  # noqa: E402
from glasshouse.jobs.verify.publish import make_artifact  # noqa: E402
from glasshouse.wire import dsse  # noqa: E402
from glasshouse.wire.canonical import (  # noqa: E402
    b64encode,
    decode,
    encode,
)
from glasshouse.wire.dsse import Envelope  # noqa: E402
from glasshouse.wire.merkle import Tree, leaf_hash  # noqa: E402
from glasshouse.wire.states import Outcome, State  # noqa: E402
from simulators.bundle_stories import STORIES  # noqa: E402 - found through the line above
from simulators.world import Run, World, envelope  # noqa: E402

GOOD = "bundle-good"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]


def whole(data: bytes) -> dict[str, Any]:
    value = decode(data, max_bytes=1 << 20)
    assert isinstance(value, dict)  # noqa: S101 - a bundle is an object
    return value


def case(kind: str, description: str, given: dict[str, Any], **expect: Any) -> dict[str, Any]:
    return {"description": description, "expect": expect, "input": given, "kind": kind}


def accepted(status: str, outcome: Outcome, assurance: str, exit_code: int) -> dict[str, Any]:
    return {
        "assurance": assurance,
        "code": None,
        "exit_code": exit_code,
        "outcome": outcome.value,
        "status": status,
    }


def bundle_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole bundles, accepted; and for each broken link what is exchanged in the good one."""
    world = World()
    owner = b64encode(world.owner.public)
    good = world.run()
    yield (
        GOOD,
        case(
            "bundle",
            "a run that completed",
            {"bundle": whole(good.data), "owner": owner},
            **accepted("good", Outcome.COMPLETED, "software", 0),
        ),
    )
    for outcome, code, reach, exit_code in (
        (Outcome.FAILED, Code.WORKER_KILLED, State.RUNNING, 4),
        (Outcome.REFUSED, Code.KEY_COMMITMENT, State.RELEASED, 3),
        (Outcome.INTERRUPTED, Code.INTERRUPTED, State.OPENED, 130),
        (Outcome.RESIDUE, Code.RESIDUE_FOUND, State.SEALED, 6),
    ):
        run = World().run(outcome=outcome, code=code, reach=reach)
        yield (
            f"bundle-{outcome.value}",
            case(
                "bundle",
                f"a run whose outcome is {outcome.value}",
                {"bundle": whole(run.data), "owner": owner},
                **accepted("not-completed", outcome, "software", exit_code),
            ),
        )
    yield (
        "bundle-broker-away",
        case(
            "bundle",
            "a run whose broker was away at its end",
            {"bundle": whole(World().run(broker_away=True).data), "owner": owner},
            **accepted("incomplete", Outcome.COMPLETED, "software", 8),
        ),
    )
    for made, reach, name in ((True, State.MEASURED, "refused-at-the-gate"), (False, State.CREATED, "never-attested")):
        run = World().run(
            attested=False, evidence_made=made, reach=reach, outcome=Outcome.REFUSED, code=Code.HARDENING_MISSING
        )
        yield (
            f"bundle-{name}",
            case(
                "bundle",
                f"a run that was {name.replace('-', ' ')}: nobody vouches for its evidence key but its launch key",
                {"bundle": whole(run.data), "owner": owner},
                **accepted("incomplete", Outcome.REFUSED, "unattested", 8),
            ),
        )
    rival = World("rival")
    yield (
        "bundle-of-another-owner",
        case(
            "bundle",
            "a wholly sound bundle by another owner",
            {"bundle": whole(rival.run().data), "owner": owner},
            code=Code.OWNER_UNKNOWN.value,
        ),
    )
    base = whole(good.data)
    for story in STORIES:
        forged = whole(story.forge(world, good))
        parts = {name: value for name, value in forged.items() if value != base[name]}
        yield (
            f"bundle-{slug(story.told)}",
            case("bundle", story.told, {"base": GOOD, "owner": owner, "parts": parts}, code=story.code.value),
        )
    for name in sorted(set(base) - {"kind"}):
        yield (
            f"bundle-lacks-{name}",
            case(
                "bundle",
                f"the part {name} is absent rather than null",
                {"base": GOOD, "owner": owner, "without": [name], "parts": {}},
                code=Code.SCHEMA.value,
            ),
        )


def head_of(run: Run) -> dict[str, Any]:
    return dict(run.heads[-1].head.to_json())


def resigned(lines: list[str], head: dict[str, Any]) -> dict[str, Any]:
    """The head that somebody with the evidence key signs over other lines."""
    tree = Tree()
    for line in lines:
        tree.append(leaf_hash(line.encode()))
    return {**head, "root": tree.root().hex(), "size": len(tree)}


def log_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Logs against the head that names them: honest, damaged, and damaged with a head to match."""
    run = World().run()
    lines, head = [line.decode().rstrip("\n") for line in run.lines], head_of(run)
    yield "log-good", case("log", "a run that completed", {"head": head, "lines": lines}, code=None)
    progress = next(number for number, line in enumerate(lines) if '"progress"' in line)
    swapped = [*lines]
    swapped[2], swapped[3] = swapped[3], swapped[2]
    changed: dict[str, list[str]] = {
        "dropped": lines[:progress] + lines[progress + 1 :],
        "repeated": lines[: progress + 1] + lines[progress:],
        "reordered": swapped,
        "cut": lines[:-1],
        "improved": [line.replace('"0.8"', '"0.1"') for line in lines],
    }
    for name, other in changed.items():
        given = {"head": head, "lines": other}
        yield f"log-{name}", case("log", f"an event was {name}", given, code=Code.LOG_INVALID.value)
        if name not in ("cut", "improved"):
            given = {"head": resigned(other, head), "lines": other}
            yield (
                f"log-{name}-and-signed",
                case("log", f"an event was {name}, and the head signed over it", given, code=Code.LOG_INVALID.value),
            )
    jump = [*lines]
    jump[1] = jump[1].replace('"state":"hardened"', '"state":"running"')
    other_state = [*lines]
    other_state[progress] = other_state[progress].replace('"state":"running"', '"state":"sealed"')
    back = [*lines]
    back[progress] = re.sub(r'"time_us":\d+', '"time_us":1', back[progress])
    late = [*lines, lines[-1].replace('"from":"zeroizing"', '"from":"zeroized"')]
    late[-1] = re.sub(r'"sequence":\d+', f'"sequence":{len(lines)}', late[-1])
    wordy = [*lines]
    wordy[progress] = wordy[progress].replace('"elapsed_us"', '"comment":"hello","elapsed_us"')
    spaced = [*lines]
    spaced[progress] = spaced[progress].replace('","', '", "')
    second = next(number for number, line in enumerate(lines) if number > progress and '"progress"' in line)

    def reported(old: str, new: str) -> list[str]:
        return [line.replace(old, new) if number == second else line for number, line in enumerate(lines)]

    silent = [*lines]
    silent[-1] = silent[-1].replace('"outcome":"completed"', '"outcome":null')
    for name, told, other, code in (
        ("illegal-transition", "a run goes from created to running", jump, Code.STATE_ILLEGAL),
        ("other-state", "an event claims another state than the run's", other_state, Code.STATE_ILLEGAL),
        ("time-goes-back", "an event goes back in time", back, Code.LOG_INVALID),
        ("after-the-end", "an event follows the end of the run", late, Code.LOG_INVALID),
        ("unknown-field", "an event has a field of its own", wordy, Code.LOG_INVALID),
        ("not-canonical", "an event is written with a space", spaced, Code.LOG_INVALID),
        ("progress-goes-back", "a count is smaller than before", reported('"done":2', '"done":0'), Code.LOG_INVALID),
        ("progress-repeated", "a count is that of before", reported('"done":2', '"done":1'), Code.LOG_INVALID),
        ("progress-other-total", "the total changes", reported('"total":5', '"total":6'), Code.LOG_INVALID),
        (
            "progress-total-withdrawn",
            "the total is taken back",
            reported('"total":5', '"total":null'),
            Code.LOG_INVALID,
        ),
        ("progress-other-unit", "the unit changes", reported('"unit":"step"', '"unit":"epoch"'), Code.LOG_INVALID),
        (
            "progress-too-soon",
            "two reports within a second",
            reported('"elapsed_us":2000000', '"elapsed_us":1999999'),
            Code.LOG_INVALID,
        ),
        ("loss-of-seven-digits", "a loss has seven digits", reported('"0.7"', '"0.7000001"'), Code.LOG_INVALID),
        ("loss-spelled-otherwise", "a loss has a needless zero", reported('"0.7"', '"0.70"'), Code.LOG_INVALID),
        ("no-outcome", "the run ends without an outcome", silent, Code.LOG_INVALID),
    ):
        given = {"head": resigned(other, head), "lines": other}
        yield f"log-{name}", case("log", told, given, code=code.value)
    counted = {"bytes": 11_000, "digest": "7b" * 32, "seq": 1, "step": 2}
    for name, told, body, code in (
        ("checkpoint", "a leg of a line had a checkpoint counted", counted, None),
        ("checkpoint-with-a-name", "a checkpoint has a path", {**counted, "path": "state"}, Code.LOG_INVALID.value),
    ):
        event = {**json.loads(lines[second]), "body": body, "type": "checkpoint"}
        other = [encode(event).decode() if number == second else line for number, line in enumerate(lines)]
        yield f"log-{name}", case("log", told, {"head": resigned(other, head), "lines": other}, code=code)
    given = {"head": {**head, "run_id": "00" * 16}, "lines": lines}
    yield "log-of-another-run", case("log", "the head is another run's", given, code=Code.LOG_INVALID.value)


def countersigning_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the gate does with a head, given the last one that it countersigned."""
    world = World()
    run = world.run()
    log, heads = run.log, [entry.head for entry in run.heads]
    last, then = run.heads[1], heads[2]
    proof = [b64encode(step) for step in log.consistency(last.head.size, then.size)]

    def given(head: Head, proof: list[str], *, previous: bool = True, key: str = "evidence", **more: Any) -> Any:
        return {
            "broker_seed": b64encode(world.broker.seed()),
            "evidence_public": b64encode(world.evidence_key.public),
            "head": head.sign(world.key(key)).to_json(),
            "now_us": world.now_us,
            "previous": json.loads(last.encode()) if previous else None,
            "proof": proof,
            "run_id": last.head.run_id,
            **more,
        }

    def refused(name: str, told: str, code: Code, value: Any) -> tuple[str, dict[str, Any]]:
        return f"head-{name}", case("countersign", told, value, code=code.value)

    yield (
        "head-first",
        case("countersign", "the first head of a run", given(heads[0], [], previous=False), code=None, repeated=False),
    )
    yield (
        "head-larger",
        case("countersign", "a larger head, consistent with the last", given(then, proof), code=None, repeated=False),
    )
    yield "head-again", case("countersign", "the identical head again", given(last.head, []), code=None, repeated=True)
    most = replace(heads[0], size=MAX_EVENTS)
    yield (
        "head-first-largest",
        case(
            "countersign",
            "a first head as large as a log can be",
            given(most, [], previous=False),
            code=None,
            repeated=False,
        ),
    )
    huge = given(replace(heads[0], size=MAX_EVENTS + 1), [], previous=False)
    yield refused("first-too-large", "a first head larger than a log can be", Code.MESSAGE_INVALID, huge)
    wrong = Code.HEAD_INCONSISTENT
    yield refused("rolled-back", "an earlier head", wrong, given(heads[0], []))
    yield refused("without-proof", "a larger head without its proof", wrong, given(then, []))
    yield refused("wrong-proof", "a larger head with another proof", wrong, given(then, [b64encode(bytes(32))]))
    yield refused("forked", "a larger head of another history", wrong, given(replace(then, root=bytes(32)), proof))
    same_size = replace(last.head, sequence=last.head.sequence + 1)
    yield refused("same-size", "a later head of the same size", wrong, given(same_size, []))
    yield refused("sequence", "a larger head with an old number", wrong, given(replace(then, sequence=0), proof))
    yield refused("time", "a larger head from before", wrong, given(replace(then, time_us=1), proof))
    yield refused("state", "a larger head in an earlier state", wrong, given(replace(then, state=State.CREATED), proof))
    yield refused("other-run", "a head of another run", wrong, given(replace(then, run_id="00" * 16), proof))
    yield refused("other-key", "a head by another key", Code.EVIDENCE_SIGNATURE, given(then, proof, key="stranger"))
    ended = replace(heads[-1], size=heads[-1].size + 1, sequence=99)
    value = given(ended, proof, previous=False)
    value["previous"] = json.loads(run.heads[-1].encode())
    yield refused("after-the-end", "a head after the end of the run", wrong, value)


def heads_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """`heads.log` beside the good bundle: whole, and with lines that were taken out, cut or forged."""
    world = World()
    run = world.run()
    lines = [head.encode().decode() + "\n" for head in run.heads]
    # One before which more than one event was written.
    at = next(n for n, one in enumerate(run.heads) if n and one.head.size - one.previous_size > 1)
    second = run.heads[at]
    signed = Envelope.from_json(whole(second.envelope.payload)["head"])

    def again(**changes: Any) -> str:
        values: dict[str, Any] = {"previous_size": second.previous_size, "time_us": second.time_us, **changes}
        made = CountersignedHead.sign(second.head, signed, broker_key=world.broker, **values)
        return made.encode().decode() + "\n"

    def given(text: str) -> dict[str, Any]:
        return {
            "base": "bundle-good",
            "heads": text,
            "lines": [line.decode().removesuffix("\n") for line in run.lines],
            "owner": b64encode(world.owner.public),
        }

    yield "heads-good", case("heads", "every head, each with its line end", given("".join(lines)), code=None)
    for name, text in (
        ("none", ""),
        ("last-line-without-its-end", "".join(lines)[:-1]),
        ("an-empty-line-more", "".join(lines) + "\n"),
        ("first-taken-out", "".join(lines[1:])),
        ("one-taken-out", "".join(lines[:1] + lines[2:])),
        ("last-taken-out", "".join(lines[:-1])),
        ("one-twice", "".join(lines[:2] + lines[1:])),
        ("previous-size-less", "".join([*lines[:at], again(previous_size=0), *lines[at + 1 :]])),
        ("previous-size-more", "".join([*lines[:at], again(previous_size=second.head.size - 1), *lines[at + 1 :]])),
        ("time-goes-back", "".join([*lines[:at], again(time_us=run.heads[0].time_us - 1), *lines[at + 1 :]])),
    ):
        yield f"heads-{name}", case("heads", name.replace("-", " "), given(text), code=Code.LOG_INVALID.value)


def artifact_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Artifacts: the owner's, altered ones, another owner's."""
    world = World()
    owner = b64encode(world.owner.public)
    data = make_artifact(
        world.run().data, owner=world.owner, canaries=[world.package_key], numbers={"accuracy": "0.956"}
    )
    good = Envelope.parse(data, max_bytes=1 << 20)
    rival = World("rival")
    other = make_artifact(rival.run().data, owner=rival.owner, canaries=[rival.package_key])

    def given(artifact: dict[str, Any]) -> dict[str, Any]:
        return {"artifact": artifact, "owner": owner}

    yield "artifact-good", case("artifact", "an owner's artifact", given(good.to_json()), code=None)
    yield (
        "artifact-of-another-owner",
        case("artifact", "another owner's artifact", given(json.loads(other)), code=Code.OWNER_UNKNOWN.value),
    )
    shown = {0: (world.digest("salt"), world.digest("adapter"))}
    revealed = make_artifact(world.run().data, owner=world.owner, canaries=[world.package_key], revealed=shown)
    yield (
        "artifact-revealed",
        case("artifact", "an owner's artifact with the weights' digest", given(json.loads(revealed)), code=None),
    )
    yield from signed_artifacts(world, envelope(revealed), given)
    content = whole(good.payload)
    for name, changes in (
        ("better-loss", {"loss": {"final": "0.000001", "first": "0.8"}}),
        ("higher-level", {"assurance": "gpu-tee"}),
        ("free-text", {"workload": "the cancer study of Dr Mustermann"}),
        ("unknown-field", {"note": "hello"}),
    ):
        predicate = {**content["predicate"], **changes}
        changed = replace(good, payload=encode({**content, "predicate": predicate}))
        yield (
            f"artifact-{name}",
            case(
                "artifact", f"altered after signing: {name}", given(changed.to_json()), code=Code.ARTIFACT_INVALID.value
            ),
        )


def signed_artifacts(world: World, honest: Envelope, given: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    """What an owner may sign, and most of which is refused."""
    probes = [{"probe": name, "result": "clean"} for name in PROBES[:-1]]
    weights = whole(honest.payload)["predicate"]["outputs"]
    for name, told, code, changes in (
        ("level", "a higher level, which no bundle bears out: alone it is the owner's word, as all of it", None,
         {"assurance": "gpu-tee", "profile": "strict"}),
        ("salt", "a digest that the salt does not fit", Code.ARTIFACT_INVALID,
         {"outputs": [{**weights[0], "plaintext_salt": "00" * 32}, weights[1]]}),
        ("file", "the digest of a file", Code.ARTIFACT_INVALID,
         {"outputs": [weights[0], {**weights[1], "plaintext_sha256": "00" * 32, "plaintext_salt": "00" * 32}]}),
        ("probe", "a probe of an unknown name", Code.ARTIFACT_INVALID,
         {"zeroization": [*probes, {"probe": "other", "result": "clean"}]}),
        ("probes", "a place that was not searched", Code.ARTIFACT_INVALID, {"zeroization": probes[1:]}),
        ("time", "a run that ended before it started", Code.ARTIFACT_INVALID, {"finished_us": 1}),
        ("closed", "a run that was countersigned long before it ended", Code.ARTIFACT_INVALID, {"countersigned_us": 1}),
    ):  # fmt: skip
        statement = whole(honest.payload)
        statement["predicate"] |= changes
        signed = dsse.sign(ARTIFACT_TYPE, encode(statement), [world.owner])
        told = f"signed by its owner: {told}"
        yield f"artifact-signed-{name}", case("artifact", told, given(signed.to_json()), code=code and code.value)
    subject = {**whole(honest.payload), "subject": [{"digest": {"sha256": "00" * 32}, "name": "weights/0000"}]}
    signed = dsse.sign(ARTIFACT_TYPE, encode(subject), [world.owner])
    yield (
        "artifact-signed-subject",
        case("artifact", "signed by its owner: a subject that is not its weights", given(signed.to_json()),
             code=Code.ARTIFACT_INVALID.value),
    )  # fmt: skip


def build() -> dict[str, bytes]:
    """Return every file's name and content."""
    files: dict[str, bytes] = {}
    for cases in (bundle_cases(), log_cases(), heads_cases(), countersigning_cases(), artifact_cases()):
        for name, document in cases:
            if f"{name}.json" in files:
                raise ValueError(f"two vectors with the name {name}")
            text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
            files[f"{name}.json"] = text.encode() + b"\n"
    return files


def main() -> None:
    files = build()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(files)} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
