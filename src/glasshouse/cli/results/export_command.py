"""`glasshouse export RUN -o DIR`: a run's evidence in the forms that other tools read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import Force, OwnerOptions, Run, option
from glasshouse.jobs.owner.home import private_folder, write_private
from glasshouse.jobs.results.exported import (
    SIGNATURE_NAME,
    bill_of_materials,
    export_keys,
    exported_run,
    model_key,
    sign_model,
)
from glasshouse.jobs.verify.line_file import LINE_NAME
from glasshouse.wire.crypto import sha256


def command(
    run: Run,
    out: Annotated[Path, option("-o --out DIR", "Where to.")],
    pem: Annotated[bool, option("--pem", "Public keys as PEM, and each signed part as a DSSE envelope.")] = False,
    model_signing: Annotated[
        bool, option("--model-signing", "model.sig over the fetched outputs, for `model_signing verify key`.")
    ] = False,
    bom: Annotated[bool, option("--bom", "A CycloneDX ML-BOM.")] = False,
    name: Annotated[str, option("--name", "What the model is called there.")] = "model",
    force: Force = False,
    *,
    options: OwnerOptions,
) -> None:
    """Write what is asked for of a run that verifies; without an option, all of it."""
    output, identity = options.output, options.unlock()
    every = not (pem or model_signing or bom)
    found = exported_run(options.own_home, run, identity)
    files: dict[str, bytes] = {}
    if pem or every:
        files |= export_keys(found.bundle, found.verdict, owner=identity.signing.public)
    if found.line is not None:
        files[LINE_NAME] = found.line
    if model_signing or every:
        found.require_good()
        key = model_key(options.own_home, identity, now_us=time.time_ns() // 1000)
        files[SIGNATURE_NAME] = sign_model(key, found.outputs, name=name, bundle_sha256=sha256(found.bundle))
        files["model-signing.pem"], files["model-signing-key.json"] = key.pem, key.certificate.encode()
    if bom or every:
        files["bom.cdx.json"] = bill_of_materials(found, name=name, fingerprint=identity.public.fingerprint)
    private_folder(out)
    for filename, data in files.items():
        write_private(out / filename, data, replace=force)
    output.result({"run_id": found.verdict.chain.receipt.run_id, "folder": str(out), "files": sorted(files)})
    output.facts({"written": ", ".join(sorted(files)), "to": out})
    if SIGNATURE_NAME in files:
        signed = f"--signature {out / SIGNATURE_NAME} --public_key {out / 'model-signing.pem'}"
        output.say(f"Check the fetched outputs with: model_signing verify key FOLDER {signed}")
        output.warn(
            "it shows that the owner published these files, and holds their digests: publish it with all of them or "
            "not at all; what stands behind the run is in its receipt alone"
        )
