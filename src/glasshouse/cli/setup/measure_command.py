"""`glasshouse measure`: what an installation measures to, part by part, and in which files it is another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from glasshouse.attestation.measurements.measured import Measured
from glasshouse.cli.options import HomeOptions, option
from glasshouse.cli.show.output import CommandOutput, printable
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.references.known_references import differences, measured_at, reference


def command(
    on: Annotated[str, option("--on MACHINE", "By its own word, a machine: a name, or ssh://user@host.")] = "local",
    diff: Annotated[
        str | None, option("--diff NAME", "List the files that differ from a reference, or from `this`.")
    ] = None,
    hardware: Annotated[
        bool, option("--hardware", "Draft a hardware policy from what this machine's roots of trust show.")
    ] = False,
    *,
    options: HomeOptions,
) -> None:
    """Print an installation's digests and what differs from a reference, or a draft of a hardware policy."""
    output, home = options.output, options.any_home
    if hardware:
        _draft(output, on)
        return
    files = measured_at(place_of(home, on))
    measured = Measured.of(files)
    found = None if diff is None else differences(files, reference(home, diff))
    output.result(
        {
            "measurement": measured.sha256.hex(),
            "parts": measured.to_json(),
            "files": {part: len(files[part]) for part in files},
            "differences": None if found is None else [asdict(one) for one in found],
        }
    )
    parts = {part: f"{digest.hex()}  {len(files[part])} files" for part, digest in measured.parts().items()}
    output.facts(parts | {"together": measured.sha256.hex()})
    if found is not None:
        same = "is the same, file by file, as" if not found else f"differs in {len(found)} files from"
        output.say(f"It {same} {diff}.", style="bold")
        for one in found:
            output.say(f"  {one.part}  {one.how:7}  {printable(one.name, keep='')}")


def _draft(output: CommandOutput, on: str) -> None:
    if on != "local":
        raise UsageError(
            Code.USAGE,
            "a machine's hardware is looked at on the machine itself",
            hint="log in there: glasshouse measure --hardware > draft.toml; with a bundle there, "
            "docs/security/hardware.md says how",
        )
    from glasshouse.jobs.references.hardware_draft import draft_of, look_at_hardware  # Linux alone has them

    seen = look_at_hardware()
    output.result(
        {
            "missing": {one.kind: one.missing for one in seen if one.missing},
            "policy": {one.kind: dict(one.draft) for one in seen if not one.missing},
        }
    )
    output.say(draft_of(seen).rstrip("\n"))
