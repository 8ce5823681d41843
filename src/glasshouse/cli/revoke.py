"""`glasshouse revoke PACKAGE|RUN`: the package's key is released to no further runtime."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, locate
from glasshouse.cli.output import Output

__all__ = ["command"]


def command(
    what: Annotated[str, typer.Argument(metavar="PACKAGE|RUN", help="A sealed package, a package id or a run.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.revoke import resolve, revoke

    output, place = Output(as_json), locate(home)
    revoked = revoke(resolve(what, place), place)
    output.result({"package": {"id": revoked.package_id}, "revoked": True, "runs_with_the_key": list(revoked.running)})
    output.say(f"Package {revoked.package_id} is revoked: its key is released to nobody any more.", style="bold")
    if revoked.running:
        names = ", ".join(run[:8] for run in revoked.running)
        output.warn(f"these runs have the key already: {names}; stop them with: glasshouse stop RUN")
