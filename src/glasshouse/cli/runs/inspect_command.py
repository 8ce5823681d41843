"""`glasshouse inspect F`: the public facts of a sealed package, and whether its signature holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import HomeOptions, argument
from glasshouse.cli.show.output import bytes_text, files_words, network_words
from glasshouse.jobs import api
from glasshouse.jobs.owner.known_owners import Anchor
from glasshouse.wire.crypto import key_id


def command(package: Annotated[Path, argument("FILE", "A sealed package.")], *, options: HomeOptions) -> None:
    """Print a package's public facts; nothing is decrypted."""
    output, found = options.output, api.inspect(package, home=options.home)
    manifest, trust = found.manifest, found.trust
    whose = {Anchor.YOURS: " (you)", Anchor.KNOWN: f" ({trust.name})"}.get(trust.anchor, " (not known here)")
    recipients = [key_id(public) for public in manifest.recipients]
    output.result(
        {
            "path": str(package),
            "package": {"id": manifest.package_id, "manifest_sha256": manifest.sha256.hex()},
            "signature": "valid",
            "owner": {"fingerprint": trust.owner.fingerprint, "is_you": found.yours, "trust": trust.to_json()},
            "workload": manifest.workload,
            "suite": manifest.suite.value,
            "chunk_bytes": manifest.chunk_bytes,
            "policy": manifest.floor.to_json(),
            "recipients": recipients,
            "index_bytes": manifest.index_bytes,
            "assets_bytes": manifest.assets_bytes,
            "package_bytes": found.bytes,
            "key_in_store": found.key_here,
        }
    )
    output.facts(
        {
            "package": manifest.package_id,
            "manifest": manifest.sha256.hex(),
            "signature": f"holds, by owner {trust.owner.fingerprint}{whose}",
            "workload": manifest.workload,
            "cipher": f"{manifest.suite.value}, chunks of {bytes_text(manifest.chunk_bytes)}",
            "demands": f"assurance {manifest.floor.assurance.value}, hardening {manifest.floor.profile.value}",
            "network": network_words(manifest.floor.egress),
            "files in": files_words(manifest.floor.disk),
            "outputs to": ", ".join(recipients),
            "size": f"{bytes_text(found.bytes)}; names and sizes of its files are sealed",
            "key": "in your key store" if found.key_here else "not in this key store",
        }
    )
    if trust.warning:
        output.say(trust.warning, style="bold yellow")
