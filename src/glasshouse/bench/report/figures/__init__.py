"""The pictures of a report: each states what it shows, and carries its numbers as a table."""

from __future__ import annotations

from glasshouse.bench.report.figures.attempts import attempts
from glasshouse.bench.report.figures.cost import job_length, width
from glasshouse.bench.report.figures.forest import forest
from glasshouse.bench.report.figures.order import order
from glasshouse.bench.report.figures.phases import phases
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.figures.series import contrasts, series
from glasshouse.bench.report.view import View

__all__ = ["Missing", "Picture", "pictures"]


def pictures(view: View) -> tuple[Picture | Missing, ...]:
    """Return all pictures of a report in their order; what was not measured says so instead of being drawn."""
    makers = (forest, series, contrasts, order, phases, job_length, width, attempts)
    return tuple(make(view) for make in makers)
