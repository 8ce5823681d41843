"""A run's card: one HTML page of who vouches for what, and the same few lines for a model card.

Law: what stands in a name or a document is text on the page, never an element, an attribute or a direction of writing;
the page refers to nothing outside of itself. A claim never stands without its maker and the assurance level.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from glasshouse.evidence.receipt import WEIGHTS
from glasshouse.jobs.results.collect import RunOutput
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.wire.crypto import key_id

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--dim:#666;--good:#176c3a;--open:#8a5300}
@media(prefers-color-scheme:dark){:root{--dim:#aaa;--good:#6fd39a;--open:#f0b35c}}
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:1.5rem 1rem;max-width:60rem}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.verdict{border-left:.3rem solid var(--open);padding:.3rem .8rem;margin:1rem 0}.good{border-color:var(--good)}
ol{list-style:none;padding:0;margin:0}li{border-top:1px solid var(--line);padding:.7rem 0}
@media(min-width:48rem){li.claim{display:grid;grid-template-columns:3fr 2fr;gap:1.5rem}}
.who{color:var(--dim)}.who b{color:inherit;display:block}
code,pre{font:.85em/1.5 ui-monospace,monospace;overflow-wrap:anywhere}
pre{white-space:pre-wrap;border:1px solid var(--line);padding:.6rem}dt{color:var(--dim);font-size:.85rem}
dd{margin:0 0 .6rem;overflow-wrap:anywhere}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_SOFTWARE = (
    "At assurance software nothing but the runtime itself stands behind what it measured and did: root on that machine "
    "could have read its memory or forged it."
)
_NOT_SHOWN = (
    "The broker is the owner's own. To all but the owner, everything here is the owner's claim.",
    "Nothing here covers the quality of the data or the model, or what the model memorised.",
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about a run, who makes it, and what stands behind it."""

    text: str
    maker: str
    rests_on: str


def claims(verdict: Verdict, outputs: Sequence[RunOutput], *, fingerprint: str) -> Iterator[Claim]:
    """Yield the claims that a verified receipt supports, with outputs that were compared with it."""
    chain, receipt = verdict.chain, verdict.chain.receipt
    runtime = f"evidence key {key_id(receipt.evidence_public)[:8]}, assurance {verdict.assurance}"
    broker = f"key {key_id(chain.delegation.broker_public)[:8]}, which the owner delegated to"
    if chain.manifest:
        floor = chain.manifest.floor
        yield Claim(
            f"The run is of package {receipt.package_id[:8]}, which demands at least assurance {floor.assurance} "
            f"and hardening {floor.profile}.",
            "The owner",
            f"key {fingerprint}",
        )
    if chain.ear and chain.claims:
        yield Claim(
            "The package's key was released to a runtime that showed the measurement "
            f"{chain.claims.measurement_sha256.hex()[:16]} and hardening {receipt.profile}.",
            "The owner's broker",
            broker,
        )
    for name, shown in verdict.links:
        if name == "hardware" and shown is not None:
            maker = "The owner's broker", broker  # a TPM's key has no signature of its maker's
            if verdict.assurance != "tpm":
                maker = "The machine's makers", "their keys"
            yield Claim(f"Its machine showed evidence of its hardware: {shown}.", *maker)
    yield Claim(_worked(verdict), "The runtime", runtime)
    if outputs:
        many = f"{len(outputs)} output" + ("" if len(outputs) == 1 else "s")
        yield Claim(f"{many} left the machine sealed, and opened as listed below.", "The owner", "opened here")
    probes = ", ".join(f"{probe.probe} {probe.result}" for probe in receipt.zeroization)
    yield Claim(f"The runtime wiped itself, and looked for what stayed behind: {probes}.", "The runtime", runtime)
    if chain.countersignature:
        signed = _date(chain.countersignature.time_us)
        yield Claim(f"All of this had been signed by {signed}.", "The owner's broker", broker)


def page(verdict: Verdict, outputs: Sequence[RunOutput], *, name: str, fingerprint: str) -> str:
    """Return the page of a model of some name; further arguments as for `claims`."""
    receipt, good = verdict.chain.receipt, verdict.status is Status.GOOD
    made = "".join(
        f'<li class="claim"><div>{_text(one.text)}</div>'
        f'<div class="who"><b>{_text(one.maker)}</b>{_text(one.rests_on)}</div></li>'
        for one in claims(verdict, outputs, fingerprint=fingerprint)
    )
    digests = "".join(
        f"<dt>{_text(one.name)} ({_text(one.kind)}, {one.plain_bytes:,} bytes)</dt>"
        f"<dd><code>{_digest(verdict, one)}</code></dd>"
        for one in outputs
    )
    open_questions = "".join(f"<li>{_text(one)}</li>" for one in _not_shown(verdict))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{_text(name)}: who vouches for what</title>
<style>{_STYLE}</style></head><body>
<h1>{_text(name)}</h1><p class="who">A training run under Glasshouse, {_text(_date(receipt.started_us))}</p>
<p class="verdict{" good" if good else ""}">{_text(verdict.sentence)}</p>
<h2>Who vouches for what</h2><ol>{made}</ol>
<h2>What has no evidence</h2><ol>{open_questions}</ol>
{f"<h2>Outputs</h2><dl>{digests}</dl>" if digests else ""}
<h2>Check it</h2><p>With the receipt, and the owner's fingerprint from the owner:</p>
<pre>glasshouse verify receipt.json --fingerprint {_text(fingerprint)}</pre>
<p class="who">This page is not signed: what counts is the result of that command.</p>
</body></html>
"""


def snippet(verdict: Verdict, outputs: Sequence[RunOutput], *, name: str, fingerprint: str) -> str:
    """Return the same in Markdown, for a model card; arguments as for `page`."""
    lines = [
        f"## Training provenance of {_code(name)}",
        "",
        _mark(verdict.sentence),
        "",
        "| claim | whose word |",
        "|---|---|",
    ]
    lines += [
        f"| {_mark(one.text)} | {_mark(one.maker)} ({_mark(one.rests_on)}) |"
        for one in claims(verdict, outputs, fingerprint=fingerprint)
    ]
    lines += ["", *(f"- {_mark(one)}" for one in _not_shown(verdict)), ""]
    lines += [*(f"- {_code(one.name)}: `{_digest(verdict, one)}`" for one in outputs), ""]
    lines += [f"Check it: `glasshouse verify receipt.json --fingerprint {fingerprint}`", ""]
    return "\n".join(lines)


def _worked(verdict: Verdict) -> str:
    receipt = verdict.chain.receipt
    if receipt.work is None:
        return "It reports no work."
    work, loss = receipt.work, receipt.loss
    losses = "" if loss is None else f", from a loss of {loss.first} to {loss.final}"
    unit = work.unit + ("" if work.done == 1 else "s")
    took = f"{work.elapsed_us / 1e6:,.1f} s"
    return f"It trained for {work.done:,} {unit} in {took}{losses}, and stopped: {work.stop_reason}."


def _not_shown(verdict: Verdict) -> list[str]:
    software = [_SOFTWARE] if verdict.assurance == "software" else []
    parts = [f"Not looked at: {', '.join(verdict.not_looked_at)}."] if verdict.not_looked_at else []
    return [*software, *_NOT_SHOWN, *parts]


def _digest(verdict: Verdict, one: RunOutput) -> str:
    """Return the digest that may be published: a small file could be guessed from that of its plaintext."""
    named = verdict.chain.receipt.outputs[one.sequence]
    return f"sha256 {one.sha256.hex()}" if named.of == WEIGHTS else f"sealed sha256 {named.sealed_sha256.hex()}"


def _date(time_us: int) -> str:
    return datetime.fromtimestamp(time_us // 1_000_000, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _plain(value: str) -> str:
    """Return text without control and direction characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in value)


def _text(value: str) -> str:
    return html.escape(_plain(value))


def _code(value: str) -> str:
    """Return a name as Markdown's code: as text, a hub makes a link of `www.x` in it."""
    text = _plain(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}"


def _mark(value: str) -> str:
    """Return text that Markdown shows as it is, also within a table."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>#|!&~" else char for char in _plain(value))
