"""`glasshouse export RUN -o DIR`: a run's evidence in the forms that other tools read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOption, Json, PassphraseFd, PassphraseFile, Run, locate, unlock
from glasshouse.cli.show.output import Output

__all__ = ["command"]


def command(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to.")],
    pem: Annotated[
        bool, typer.Option("--pem", help="Public keys as PEM, and each signed part as a DSSE envelope.")
    ] = False,
    model_signing: Annotated[
        bool,
        typer.Option("--model-signing", help="model.sig over the fetched outputs, for `model_signing verify key`."),
    ] = False,
    bom: Annotated[bool, typer.Option("--bom", help="A CycloneDX ML-BOM.")] = False,
    name: Annotated[str, typer.Option("--name", help="What the model is called there.")] = "model",
    force: Force = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.files import private_folder, write_private
    from glasshouse.jobs.results.exported import export_keys, exported_run

    output, place = Output(as_json), locate(home)
    identity = unlock(place, passphrase_file, passphrase_fd)
    every = not (pem or model_signing or bom)
    found = exported_run(place, run, identity)
    files: dict[str, bytes] = {}
    if pem or every:
        files |= export_keys(found.bundle, found.verdict, owner=identity.signing.public)
    if model_signing or every:
        from glasshouse.jobs.results.model_signing import SIGNATURE_NAME, model_key, sign_model
        from glasshouse.wire.kdf import sha256

        found.require_good()
        key = model_key(place, identity, now_us=time.time_ns() // 1000)
        files[SIGNATURE_NAME] = sign_model(key, found.outputs, name=name, bundle_sha256=sha256(found.bundle))
        files["model-signing.pem"], files["model-signing-key.json"] = key.pem, key.certificate.encode()
    if bom or every:
        from glasshouse.jobs.results.bom import bill_of_materials

        files["bom.cdx.json"] = bill_of_materials(
            found.verdict, found.outputs, name=name, bundle=found.bundle, fingerprint=identity.public.fingerprint
        )
    private_folder(out)
    for filename, data in files.items():
        write_private(out / filename, data, replace=force)
    output.result({"run_id": found.verdict.chain.receipt.run_id, "folder": str(out), "files": sorted(files)})
    output.facts({"written": ", ".join(sorted(files)), "to": out})
    if "model.sig" in files:
        signed = f"--signature {out / 'model.sig'} --public_key {out / 'model-signing.pem'}"
        output.say(f"Check the fetched outputs with: model_signing verify key FOLDER {signed}")
        output.warn(
            "it says that the owner published these files, and holds their digests: publish it with all of them or not "
            "at all; what stands behind the run is in its receipt alone"
        )
