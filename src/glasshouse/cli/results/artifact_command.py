"""`glasshouse artifact RUN -o F`: a public account of a run, signed, in which no name or secret can stand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import Force, OwnerOptions, Run, option
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.receipt import WEIGHTS
from glasshouse.jobs.owner.home import Home, write_private
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import look_inside, require_receipt
from glasshouse.jobs.supervise.control import concluded, look, require_ended
from glasshouse.jobs.verify.conclusion import read_receipt
from glasshouse.jobs.verify.publish import leak_patterns, make_artifact
from glasshouse.jobs.verify.verdict import verify_bundle


def command(
    run: Run,
    out: Annotated[Path, option("-o --out FILE", "Where to.")],
    number: Annotated[list[str] | None, option("--number NAME=VALUE", "A public result, as a decimal.")] = None,
    reveal_weights: Annotated[
        bool, option("--reveal-weights", "Publish the weights' digests, so that anyone can compare a file.")
    ] = False,
    force: Force = False,
    *,
    options: OwnerOptions,
) -> None:
    """Verify a run's receipt, and write a signed artifact of it."""
    output, home = options.output, options.own_home
    found = look(RunFolder.find(home, run), home)
    require_ended(found)
    identity = options.unlock()
    bundle = read_receipt(found.folder)
    verify_bundle(bundle, owner=identity.signing.public, run_id=found.record.run_id)
    data = make_artifact(
        bundle,
        owner=identity.signing,
        canaries=leak_patterns(found.folder, found.record, home=home, identity=identity),
        numbers=_numbers(number or []),
        revealed=_weights(found.folder, home, identity) if reveal_weights else None,
    )
    write_private(out, data, replace=force)
    output.result({"path": str(out), "run_id": found.record.run_id, "bytes": len(data)})
    if reveal_weights:
        output.say(
            "It names the weights by their SHA-256: anyone who has the file, or can train it again, "
            "can tell that it is this."
        )
    output.say(f"The artifact is in {out}; anyone checks it with: glasshouse verify {out} --owner owner.pub")


def _weights(folder: RunFolder, home: Home, identity: Identity) -> dict[int, tuple[bytes, bytes]]:
    """Return salt and digest of every output of weights, from the sealed files of a run whose receipt holds."""
    receipt = require_receipt(concluded(folder, home, folder.load()))
    opened = look_inside(folder, receipt, sealing=identity.sealing)
    found = {
        one.sequence: (one.salt, one.sha256)
        for one, output in zip(opened, receipt.outputs, strict=True)
        if output.of == WEIGHTS
    }
    if not found:
        raise UsageError(Code.USAGE, "the run has no weights whose digest could be published")
    return found


def _numbers(given: list[str]) -> dict[str, str]:
    numbers: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in numbers:
            raise UsageError(Code.USAGE, f"--number {text[:60]!r} is not NAME=VALUE, or is given twice")
        numbers[name] = value
    return numbers
