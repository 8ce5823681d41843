"""`glasshouse logs RUN`: decrypts what the training wrote to standard output and error."""

from __future__ import annotations

import sys

from glasshouse.cli.options import (
    HomeOption,
    Json,
    Machine,
    PassphraseFd,
    PassphraseFile,
    Run,
    locate,
    of_machine,
    unlock,
)
from glasshouse.cli.output import Output, printable

__all__ = ["command"]


def command(
    run: Run = "latest",
    machine: Machine = 0,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.logs import named_segments, segments
    from glasshouse.jobs.rundir import RunFolder

    output, place = Output(as_json), locate(home)
    folder = of_machine(RunFolder.find(place, run), machine)
    record = folder.load()
    identity = unlock(place, passphrase_file, passphrase_fd)
    named = named_segments(folder, owner_signing=identity.signing.public)
    manifest_sha256 = bytes.fromhex(record.manifest_sha256)
    found = segments(folder, named.events, sealing=identity.sealing, manifest_sha256=manifest_sha256)
    if output.as_json:
        text = [
            {"sequence": one.sequence, "name": one.name, "text": one.data.decode(errors="replace")} for one in found
        ]
        output.result(
            {"run_id": record.run_id, "vouched": named.vouched, "problem": named.why or None, "segments": text}
        )
        return
    if not named.vouched:
        output.warn(f"nothing vouches for this log yet, the machine's host may have written it: {named.why}")
    empty = True
    for one in found:
        empty = False
        if sys.stdout.isatty():
            # A log comes from a machine that nobody trusts: on a terminal it may print, and not command.
            sys.stdout.write(printable(one.data.decode(errors="replace").replace("\r\n", "\n"), keep="\n\t"))
        else:
            sys.stdout.buffer.write(one.data)
    sys.stdout.flush()
    if empty:
        output.warn("this run has printed nothing so far" if record.outcome is None else "this run printed nothing")
