"""A measurement of overhead as a page for people: `report.html`, and its pictures as SVG and PNG files.

Laws: the page shows what `Measurement` computed and estimates nothing by other means; it is self-contained, runs no
script, and the same measurement gives the same bytes; what was not measured is said to be so.
"""

from __future__ import annotations

from glasshouse.bench.report.page import build, write

__all__ = ["build", "write"]
