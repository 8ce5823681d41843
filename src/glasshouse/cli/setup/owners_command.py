"""`glasshouse owners add|list|remove`: the owners whose receipts, artifacts and packages you recognise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOptions, argument, option
from glasshouse.errors import Code, VerificationError
from glasshouse.jobs.owner.home import is_file
from glasshouse.jobs.owner.known_owners import add_owner, known_owners, remove_owner, same_fingerprint
from glasshouse.jobs.owner.owner_identity import read_public

group = typer.Typer(no_args_is_help=True)


@group.command("add")
def add(
    file: Annotated[Path, argument("FILE", "Their owner.pub.")],
    name: Annotated[str | None, option("--name", "What to call them; the file's name by default.")] = None,
    fingerprint: Annotated[
        str | None, option("--fingerprint HEX", "What the owner says it is; others are refused.")
    ] = None,
    force: Force = False,
    *,
    options: HomeOptions,
) -> None:
    """Recognise an owner from now on: compare the fingerprint with them first."""
    owner, called = read_public(file), name or file.stem
    if fingerprint is not None and not same_fingerprint(owner, fingerprint):
        raise VerificationError(Code.OWNER_UNKNOWN, f"{file} has another fingerprint: {owner.fingerprint}")
    add_owner(options.any_home, called, owner, replace=force)
    options.output.result({"name": called, "fingerprint": owner.fingerprint})
    options.output.say(f"{called} is known now: {owner.fingerprint}")
    if fingerprint is None:
        options.output.warn(
            "compare this fingerprint with one that you have from the owner; if it differs: glasshouse owners remove"
        )


@group.command("list")
def show(*, options: HomeOptions) -> None:
    """The owners that are known here."""
    output, home = options.output, options.any_home
    owners = {name: owner.fingerprint for name, owner in known_owners(home).items()}
    own = read_public(home.owner_public).fingerprint if is_file(home.owner_public) else None
    output.result({"owners": [{"name": name, "fingerprint": text} for name, text in owners.items()], "yours": own})
    output.facts({"you": own, **owners})
    if own is None and not owners:
        output.say("No owner is known here: glasshouse owners add FILE")


@group.command("remove")
def remove(
    name: Annotated[str, argument("NAME", "Their name here, or their fingerprint.")],
    *,
    options: HomeOptions,
) -> None:
    """Recognise an owner no more."""
    called, owner = remove_owner(options.any_home, name)
    options.output.result({"name": called, "fingerprint": owner.fingerprint})
    options.output.say(f"{called} ({owner.fingerprint}) is not known here any more.")
