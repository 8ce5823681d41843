"""`glasshouse seal JOB.toml -o F`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import Force, OwnerOptions, argument, option
from glasshouse.cli.show.output import CommandOutput, bytes_text, files_words, left_out_words, network_words
from glasshouse.jobs import api

_BIG_BYTES = 64 << 20


def command(
    job_file: Annotated[Path, argument("JOB.toml", "The job file.")],
    out: Annotated[
        Path | None, option("-o --out FILE", "The sealed package; NAME.sealed here, after the job's name.")
    ] = None,
    force: Force = False,
    *,
    options: OwnerOptions,
) -> None:
    """Seal a job, and print what its package holds and demands."""
    output, home = options.output, options.own_home
    progress, passphrase = _progress_of(output), options.passphrase
    sealed = api.seal(job_file, out, replace=force, progress=progress, passphrase=passphrase, home=options.home)
    manifest = sealed.manifest
    for note in sealed.notes:
        output.warn(note)
    output.result(
        {
            "path": str(sealed.path),
            "package": {"id": manifest.package_id, "manifest_sha256": manifest.sha256.hex()},
            "name": sealed.name,
            "workload": manifest.workload,
            "suite": manifest.suite.value,
            "policy": manifest.floor.to_json(),
            "files": sealed.files,
            "left_out": list(sealed.left_out),
            "notes": list(sealed.notes),
            "plain_bytes": sealed.plain_bytes,
            "package_bytes": sealed.package_bytes,
            "seconds": round(sealed.seconds, 4),
        }
    )
    output.say(f"Sealed {sealed.name} into {sealed.path}.", style="bold green")
    output.facts(
        {
            "package": manifest.package_id,
            "holds": f"{sealed.files} file(s), {bytes_text(sealed.plain_bytes)}, as {bytes_text(sealed.package_bytes)}",
            "left out": left_out_words(sealed.left_out),
            "demands": f"assurance {manifest.floor.assurance.value}, hardening {manifest.floor.profile.value}, "
            + ("no network" if not manifest.floor.egress else "network to " + network_words(manifest.floor.egress))
            + (f", files in {files_words(True)}" if manifest.floor.disk else ""),
            "key": f"{home.keys / manifest.package_id}.json: sealed to you; without it the package stays closed",
            "next": f"glasshouse run {shlex.quote(str(sealed.path))}{options.again}",
        }
    )


def _progress_of(output: CommandOutput) -> Callable[[int, int], None] | None:
    """Return a progress line for packages that take a while, where a person is watching."""
    if output.as_json or not output.console.is_terminal:
        return None
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        percent = done * 100 // total if total else 100
        if total > _BIG_BYTES and percent != shown:
            shown = percent
            output.console.print(f"  sealing {percent:3d} %", end="\n" if done == total else "\r")

    return progress
