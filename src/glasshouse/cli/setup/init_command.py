"""`glasshouse init`: makes the owner's identity and the state home."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import OwnerOptions, ask_new_passphrase, option
from glasshouse.jobs.owner.owner_identity import Identity


def command(
    passphrase: Annotated[bool, option("--passphrase", "Ask for one and encrypt the keys.")] = False,
    *,
    options: OwnerOptions,
) -> None:
    """Make an identity where there is none."""
    output, home, at = options.output, options.any_home, options.again
    home.refuse_old()
    home.make()
    file, descriptor = options.passphrase_file, options.passphrase_fd
    wanted = passphrase or file is not None or descriptor is not None
    secret = ask_new_passphrase(file, descriptor) if wanted else None
    identity = Identity.generate()
    identity.save(private=home.owner_private, public=home.owner_public, passphrase=secret)
    fingerprint = identity.public.fingerprint
    made = {"home": str(home.path), "fingerprint": fingerprint, "encrypted": secret is not None}
    output.result(made | {"owner": str(home.owner_public)})
    output.say("Your identity is made.", style="bold green")
    output.facts(
        {
            "fingerprint": fingerprint,
            "public": f"{home.owner_public}: give it to those who verify your receipts",
            "private": f"{home.owner_private}: " + ("encrypted" if secret else "in the clear, for your user alone"),
            "next": f"glasshouse run JOB.toml{at}, and keep a copy: glasshouse identity export -o FILE{at}",
        }
    )
    if secret is None:
        output.warn("no passphrase: who reads your files opens your packages and outputs (init --passphrase)")
