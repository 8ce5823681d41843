"""`glasshouse init`: makes the owner's identity and the state home."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile, again, ask_new_passphrase
from glasshouse.cli.show.output import Output

__all__ = ["command"]


def command(
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Ask for one and encrypt the keys.")] = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.owner_identity import Identity

    output, at = Output(as_json), again(home)
    wanted = passphrase or passphrase_file is not None or passphrase_fd is not None
    place = Home.locate(home)
    place.refuse_old()
    place.make()
    secret = ask_new_passphrase(passphrase_file, passphrase_fd) if wanted else None
    identity = Identity.generate()
    identity.save(private=place.owner_private, public=place.owner_public, passphrase=secret)
    output.result(
        {
            "home": str(place.path),
            "fingerprint": identity.public.fingerprint,
            "encrypted": secret is not None,
            "owner": str(place.owner_public),
        }
    )
    output.say("Your identity is made.", style="bold green")
    output.facts(
        {
            "fingerprint": identity.public.fingerprint,
            "public": f"{place.owner_public}: give it to those who verify your receipts",
            "private": f"{place.owner_private}: " + ("encrypted" if secret else "in the clear, for your user alone"),
            "next": f"glasshouse run JOB.toml{at}, and keep a copy: glasshouse identity export -o FILE{at}",
        }
    )
    if secret is None:
        output.warn("no passphrase: who reads your files opens your packages and outputs (init --passphrase)")
