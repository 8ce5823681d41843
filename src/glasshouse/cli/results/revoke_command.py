"""`glasshouse revoke PACKAGE|RUN`: the package's key is released to no further runtime, and running ones end."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import GateOption, OwnerOptions, argument, option
from glasshouse.jobs.gates.known_gates import gate_name
from glasshouse.jobs.gates.revocation import holders, resolve, revoke


def command(
    what: Annotated[str, argument("PACKAGE|RUN", "A sealed package, a package id or a run.")],
    running: Annotated[
        bool, option("--running", "End runs that have the key too: their leases are not renewed any more.")
    ] = False,
    gate: GateOption = None,
    *,
    options: OwnerOptions,
) -> None:
    """Revoke a package's key at every gate that holds it."""
    output, home = options.output, options.own_home
    package_id = resolve(what, home)
    gates = holders(package_id, home, also=None if gate is None else gate_name(home, gate))
    owner = options.unlock().signing if gates else None
    going = revoke(package_id, home, gates=gates, owner=owner, running=running)
    output.result(
        {
            "gates": [one.name for one in gates],
            "package": {"id": package_id},
            "revoked": True,
            "running": running,
            "runs_with_the_key": going,
        }
    )
    output.say(f"Package {package_id} is revoked: its key is released no more.", style="bold")
    if going and running:
        output.say("Runs that have it end within their lease, and their receipts stay without a countersignature.")
    elif going:
        names = ", ".join(run[:8] for run in going)
        output.warn(
            f"these runs have the key already: {names}; stop them with: glasshouse stop RUN, or revoke --running"
        )
