"""One page that shows a measurement: numbers first, four pictures, no scripts, nothing from elsewhere.

Laws: it claims no more than the analysis does; the same measurement gives the same bytes; whatever text stands in it
was escaped.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from glasshouse.jobs.owner.durations import utc
from glasshouse_bench.design import Mode
from glasshouse_bench.report import pictures
from glasshouse_bench.report.published import read_rows
from glasshouse_bench.statement import LIMITS, Measured, Measurement
from glasshouse_bench.verdict import LACKS, MeasurementVerdict, found_of, percent

__all__ = ["render"]

_HELD_BACK = {
    "attempts": "not all sessions of the design were attempted",
    "background": "the processor time of agent and watchdog is not known for every session",
    "losses": "the losses of both arms differ although the workload is deterministic",
}
_NAMES = {
    Mode.INTERLEAVED: "Interleaved",
    Mode.NULL: "Null (raw against raw)",
    Mode.SEQUENTIAL: "Sequential",
    Mode.ALTERNATING: "Alternating whole processes",
}


def render(measurement: Measurement, *, published: Path | None = None) -> str:
    """Return the page of a measurement.

    Args:
        published: a file of rows to draw beside the result; by default those that others published of such a workload.

    Raises:
        UsageError: the file cannot be read.
        FormatError: `schema-invalid`, it has other members.
    """
    main = measurement.main
    rows = read_rows(published, kind=main.part.design.workload.kind.value)
    drawn = [pictures.forest(measurement, rows), pictures.sessions(measurement)]
    if main.analysis["jobs"] is not None:
        drawn.append(pictures.jobs(main))
    if measurement.phases is not None:
        drawn.append(pictures.phases(measurement.phases))
    # Without receipts and signature: the page says so, and names what a reader sees without them.
    unsigned = MeasurementVerdict(measurement=measurement, backings=(), created_us=0)
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=_number, percent=_percent, seconds=_seconds, share=_share, utc=utc)
    return environment.from_string(page).render(
        design=main.part.design,
        held_back=[_HELD_BACK[name] for name in (main.analysis["claim"] or {}).get("held_back", ())],
        lacks=[LACKS[lack] for lack in unsigned.lacks],
        limits=LIMITS,
        main=main,
        measurement=measurement,
        names=_NAMES,
        null=measurement.part(Mode.NULL),
        phases=[] if measurement.phases is None else pictures.phase_rows(measurement.phases),
        pictures=[(Markup(svg), caption) for svg, caption in drawn],  # noqa: S704 - drawn here, its texts escaped there
        said=found_of(measurement),
        word=_word(main),
    )


def _word(main: Measured) -> str:
    claim = main.analysis["claim"]
    return "no word is claimed" if claim is None else claim["word"].replace("_", " ")


def _percent(value: str | float, digits: int = 2) -> str:
    return percent(value, digits).replace("-", "\N{MINUS SIGN}")


def _share(value: str | float) -> str:
    """Return a part of something, which has no sign."""
    return f"{float(value) * 100:.2g} %"


def _number(value: str | float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{float(value):.{digits}g}"


def _seconds(value: Any) -> str:
    """Return a time with a unit that suits it."""
    if value is None:
        return "–"
    seconds = float(value)
    for unit, scale in (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
