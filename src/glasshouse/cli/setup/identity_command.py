"""`glasshouse identity show|pem|export|restore|move`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import (
    Force,
    HomeOptions,
    OwnerOptions,
    PassphraseFd,
    PassphraseFile,
    argument,
    ask_new_passphrase,
    option,
    read_passphrase,
)
from glasshouse.jobs.owner.home import is_there, read_bounded, write_private
from glasshouse.jobs.owner.owner_identity import Identity, is_encrypted, read_private, read_public
from glasshouse.jobs.places.relocate import relocate
from glasshouse.jobs.results.exported import public_pem
from glasshouse.wire.crypto import key_id

group = typer.Typer(no_args_is_help=True)
_Out = Annotated[Path, option("-o --out FILE", "Where to.")]


@group.command("show")
def show(*, options: HomeOptions) -> None:
    """Show the public half of the identity."""
    output, home = options.output, options.own_home
    options.mention_old()
    owner = read_public(home.owner_public)
    encrypted = is_encrypted(read_private(home.owner_private)) if is_there(home.owner_private) else None
    signing, sealing = key_id(owner.signing), key_id(owner.sealing)
    output.result(
        {
            "fingerprint": owner.fingerprint,
            "signing_key_id": signing,
            "sealing_key_id": sealing,
            "owner": str(home.owner_public),
            "private_key": encrypted is not None,
            "encrypted": encrypted,
        }
    )
    output.facts(
        {
            "fingerprint": owner.fingerprint,
            "signing key": signing,
            "sealing key": sealing,
            "public file": home.owner_public,
            "private file": "not here" if encrypted is None else "encrypted" if encrypted else "not encrypted",
        }
    )


@group.command("pem")
def pem(out: _Out, force: Force = False, *, options: HomeOptions) -> None:
    """Write the public signing key as PEM, for other tools."""
    owner = read_public(options.own_home.owner_public)
    write_private(out, public_pem(owner.signing), replace=force)
    options.output.result({"path": str(out), "fingerprint": owner.fingerprint})
    options.output.say(f"The public signing key of {owner.fingerprint} is in {out}.")


@group.command("export")
def export(
    out: _Out,
    export_passphrase_file: Annotated[
        Path | None, option("--export-passphrase-file FILE", "Passphrase of the copy.")
    ] = None,
    force: Force = False,
    *,
    options: OwnerOptions,
) -> None:
    """Write an encrypted copy of the identity."""
    output, identity = options.output, options.unlock()
    secret = ask_new_passphrase(
        export_passphrase_file,
        None,
        prompt="Passphrase of the copy: ",
        hint="name a file that holds the passphrase of the copy with --export-passphrase-file",
    )
    write_private(out, identity.encode(secret), replace=force)
    output.result({"path": str(out), "fingerprint": identity.public.fingerprint, "encrypted": True})
    output.say(f"An encrypted copy of {identity.public.fingerprint} is in {out}.")
    output.warn(f"it does not hold the keys of single packages: keep a copy of {options.own_home.keys} too")


@group.command("restore")
def restore(
    file: Annotated[Path, argument("FILE", "What `identity export` wrote.")],
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    decrypt: Annotated[bool, option("--decrypt", "Keep the private keys in the clear here.")] = False,
    *,
    options: HomeOptions,
) -> None:
    """Bring an exported identity into a state home that has none."""
    data = read_bounded(file, what="identity copy")
    secret = read_passphrase(passphrase_file, passphrase_fd) if is_encrypted(data) else None
    identity, home = Identity.parse(data, secret), options.any_home.make()
    kept = None if decrypt else secret
    identity.save(private=home.owner_private, public=home.owner_public, passphrase=kept)
    fingerprint = identity.public.fingerprint
    options.output.result({"home": str(home.path), "fingerprint": fingerprint, "encrypted": kept is not None})
    options.output.say(f"{fingerprint} is restored in {home.path}.")


@group.command("move")
def move(
    source: Annotated[Path, argument("[DIR]", "The old home; its runs stay where they are.")] = Path(".glasshouse"),
    *,
    options: HomeOptions,
) -> None:
    """Move keys and broker out of a project's .glasshouse, where earlier versions kept them."""
    output, home = options.output, options.any_home
    moved = relocate(source.absolute(), home)
    output.result(
        {
            "home": str(home.path),
            "fingerprint": moved.fingerprint,
            "files": moved.files,
            "kept": [str(path) for path in moved.kept],
        }
    )
    output.say(f"The identity {moved.fingerprint} and {moved.files} file(s) of its home are now in {home.path}.")
    for path in moved.kept:
        output.warn(f"{path} stays: {home.path} has another file of that name")
