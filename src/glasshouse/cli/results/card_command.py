"""`glasshouse card RUN -o F`: one page of who vouches for what in a run, and the lines for a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import Force, OwnerOptions, Run, option
from glasshouse.jobs.owner.home import write_private
from glasshouse.jobs.results.exported import exported_run
from glasshouse.jobs.results.run_card import page, snippet


def command(
    run: Run,
    out: Annotated[Path, option("-o --out FILE", "The page; the model card's lines beside it.")],
    name: Annotated[str, option("--name", "What the model is called on it.")] = "model",
    force: Force = False,
    *,
    options: OwnerOptions,
) -> None:
    """Write the page of a run that verifies, and its lines for a model card."""
    output, identity = options.output, options.unlock()
    found, beside = exported_run(options.own_home, run, identity), out.with_suffix(".md")
    fingerprint = identity.public.fingerprint
    made = page(found.verdict, found.outputs, name=name, fingerprint=fingerprint)
    lines = snippet(found.verdict, found.outputs, name=name, fingerprint=fingerprint)
    write_private(out, made.encode(), replace=force)
    write_private(beside, lines.encode(), replace=force)
    output.result({"run_id": found.verdict.chain.receipt.run_id, "page": str(out), "snippet": str(beside)})
    output.say(f"Who vouches for what is in {out}; the same for a model card is in {beside}.")
    output.warn("both name the outputs, as the owner sees them: look at them before you publish them")
