"""`glasshouse identity show|export|restore|move`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import (
    Force,
    HomeOption,
    Json,
    PassphraseFd,
    PassphraseFile,
    ask_new_passphrase,
    locate,
    mention_old,
    read_passphrase,
    unlock,
)
from glasshouse.cli.show.output import Output

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command("show", help="Show the public half of the identity.")
def show(home: HomeOption = None, as_json: Json = False) -> None:
    from glasshouse.jobs.owner.files import is_there
    from glasshouse.jobs.owner.owner_identity import is_encrypted, read_private, read_public
    from glasshouse.wire.hpke import recipient_id
    from glasshouse.wire.signing import key_id

    output, place = Output(as_json), locate(home)
    mention_old(output, place)
    owner = read_public(place.owner_public)
    here = is_there(place.owner_private)
    facts = {
        "fingerprint": owner.fingerprint,
        "signing_key_id": key_id(owner.signing),
        "sealing_key_id": recipient_id(owner.sealing),
        "owner": str(place.owner_public),
        "private_key": here,
        "encrypted": is_encrypted(read_private(place.owner_private)) if here else None,
    }
    output.result(facts)
    output.facts(
        {
            "fingerprint": owner.fingerprint,
            "signing key": facts["signing_key_id"],
            "sealing key": facts["sealing_key_id"],
            "public file": place.owner_public,
            "private file": {True: "encrypted", False: "not encrypted", None: "not here"}[facts["encrypted"]],  # type: ignore[index]
        }
    )


@group.command("pem", help="Write the public signing key as PEM, for other tools.")
def pem(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to.")],
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.files import write_private
    from glasshouse.jobs.owner.owner_identity import read_public
    from glasshouse.jobs.results.exported import public_pem

    output, owner = Output(as_json), read_public(locate(home).owner_public)
    write_private(out, public_pem(owner.signing), replace=force)
    output.result({"path": str(out), "fingerprint": owner.fingerprint})
    output.say(f"The public signing key of {owner.fingerprint} is in {out}.")


@group.command("export", help="Write an encrypted copy of the identity.")
def export(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to.")],
    export_passphrase_file: Annotated[
        Path | None, typer.Option("--export-passphrase-file", metavar="FILE", help="Passphrase of the copy.")
    ] = None,
    force: Force = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.files import write_private

    output, place = Output(as_json), locate(home)
    identity = unlock(place, passphrase_file, passphrase_fd)
    secret = ask_new_passphrase(
        export_passphrase_file,
        None,
        prompt="Passphrase of the copy: ",
        hint="name a file that holds the passphrase of the copy with --export-passphrase-file",
    )
    write_private(out, identity.encode(secret), replace=force)
    output.result({"path": str(out), "fingerprint": identity.public.fingerprint, "encrypted": True})
    output.say(f"An encrypted copy of {identity.public.fingerprint} is in {out}.")
    output.warn(f"it does not hold the keys of single packages: keep a copy of {place.keys} too")


@group.command("restore", help="Bring an exported identity into a state home that has none.")
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `identity export` wrote.")],
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    decrypt: Annotated[bool, typer.Option("--decrypt", help="Keep the private keys in the clear here.")] = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.files import read_bounded
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.owner_identity import Identity, is_encrypted

    output = Output(as_json)
    data = read_bounded(file, what="identity copy")
    secret = read_passphrase(passphrase_file, passphrase_fd) if is_encrypted(data) else None
    identity = Identity.parse(data, secret)
    place = Home.locate(home).make()
    identity.save(private=place.owner_private, public=place.owner_public, passphrase=None if decrypt else secret)
    output.result(
        {
            "home": str(place.path),
            "fingerprint": identity.public.fingerprint,
            "encrypted": secret is not None and not decrypt,
        }
    )
    output.say(f"{identity.public.fingerprint} is restored in {place.path}.")


@group.command("move", help="Move keys and broker out of a project's .glasshouse, where earlier versions kept them.")
def move(
    source: Annotated[Path, typer.Argument(metavar="[DIR]", help="The old home; its runs stay where they are.")] = Path(
        ".glasshouse"
    ),
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.supervise.relocate import relocate

    output, place = Output(as_json), Home.locate(home)
    moved = relocate(source.absolute(), place)
    output.result(
        {
            "home": str(place.path),
            "fingerprint": moved.fingerprint,
            "files": moved.files,
            "kept": [str(path) for path in moved.kept],
        }
    )
    output.say(f"The identity {moved.fingerprint} and {moved.files} file(s) of its home are now in {place.path}.")
    for path in moved.kept:
        output.warn(f"{path} stays: {place.path} has another file of that name")
