"""`glasshouse owners add|list|remove`: the owners whose receipts, artifacts and packages you recognise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.show.output import Output
from glasshouse.errors import Code, VerificationError

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command("add", help="Recognise an owner from now on: compare the fingerprint with them first.")
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Their owner.pub.")],
    name: Annotated[str | None, typer.Option("--name", help="What to call them; the file's name by default.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", metavar="HEX", help="What the owner says it is; others are refused.")
    ] = None,
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.known_owners import add_owner, same_fingerprint
    from glasshouse.jobs.owner.owner_identity import read_public

    output, place = Output(as_json), Home.locate(home)
    owner, called = read_public(file), name or file.stem
    if fingerprint is not None and not same_fingerprint(owner, fingerprint):
        raise VerificationError(Code.OWNER_UNKNOWN, f"{file} has another fingerprint: {owner.fingerprint}")
    add_owner(place, called, owner, replace=force)
    output.result({"name": called, "fingerprint": owner.fingerprint})
    output.say(f"{called} is known now: {owner.fingerprint}")
    if fingerprint is None:
        output.warn(
            "compare this fingerprint with one that you have from the owner; if it differs: glasshouse owners remove"
        )


@group.command("list", help="The owners that are known here.")
def show(home: HomeOption = None, as_json: Json = False) -> None:
    from glasshouse.jobs.owner.files import is_file
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.known_owners import known_owners
    from glasshouse.jobs.owner.owner_identity import read_public

    output, place = Output(as_json), Home.locate(home)
    owners = {name: owner.fingerprint for name, owner in known_owners(place).items()}
    own = read_public(place.owner_public).fingerprint if is_file(place.owner_public) else None
    output.result(
        {"owners": [{"name": name, "fingerprint": text} for name, text in owners.items()], "yours": own},
    )
    output.facts(({} if own is None else {"you": own}) | owners)
    if own is None and not owners:
        output.say("No owner is known here: glasshouse owners add FILE")


@group.command("remove", help="Recognise an owner no more.")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Their name here, or their fingerprint.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.known_owners import remove_owner

    output = Output(as_json)
    called, owner = remove_owner(Home.locate(home), name)
    output.result({"name": called, "fingerprint": owner.fingerprint})
    output.say(f"{called} ({owner.fingerprint}) is not known here any more.")
