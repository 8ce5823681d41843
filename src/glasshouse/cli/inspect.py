"""`glasshouse inspect F`: the public facts of a sealed package, and whether its signature holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json
from glasshouse.cli.output import Output
from glasshouse.cli.words import bytes_text, files_words, network_words

__all__ = ["command"]


def command(
    package: Annotated[Path, typer.Argument(metavar="FILE", help="A sealed package.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.files import is_file
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.identity import OwnerPublic
    from glasshouse.jobs.owners import Anchor, recognise
    from glasshouse.jobs.run import public_part
    from glasshouse.wire.hpke import recipient_id

    output, place = Output(as_json), Home.locate(home)
    manifest, _envelope = public_part(package)
    owner = OwnerPublic(signing=manifest.owner_signing, sealing=manifest.owner_sealing)
    trust = recognise(place, owner)
    mine = trust.anchor is Anchor.YOURS if is_file(place.owner_public) else None
    whose = {Anchor.YOURS: " (you)", Anchor.KNOWN: f" ({trust.name})"}.get(trust.anchor, " (not known here)")
    key_here = is_file(place.keys / f"{manifest.package_id}.json")
    recipients = [recipient_id(public) for public in manifest.recipients]
    size = package.stat().st_size
    output.result(
        {
            "path": str(package),
            "package": {"id": manifest.package_id, "manifest_sha256": manifest.sha256.hex()},
            "signature": "valid",
            "owner": {"fingerprint": owner.fingerprint, "is_you": mine, "trust": trust.to_json()},
            "workload": manifest.workload,
            "suite": manifest.suite.value,
            "chunk_bytes": manifest.chunk_bytes,
            "policy": manifest.floor.to_json(),
            "recipients": recipients,
            "index_bytes": manifest.index_bytes,
            "assets_bytes": manifest.assets_bytes,
            "package_bytes": size,
            "key_in_store": key_here,
        }
    )
    output.facts(
        {
            "package": manifest.package_id,
            "manifest": manifest.sha256.hex(),
            "signature": f"holds, by owner {owner.fingerprint}{whose}",
            "workload": manifest.workload,
            "cipher": f"{manifest.suite.value}, chunks of {bytes_text(manifest.chunk_bytes)}",
            "demands": f"assurance {manifest.floor.assurance.value}, hardening {manifest.floor.profile.value}",
            "network": network_words(manifest.floor.egress),
            "files in": files_words(manifest.floor.disk),
            "outputs to": ", ".join(recipients),
            "size": f"{bytes_text(size)}; names and sizes of its files are sealed",
            "key": "in your key store" if key_here else "not in this key store",
        }
    )
    if trust.warning:
        output.say(trust.warning, style="bold yellow")
