"""The real agent on a machine of SEV-SNP: its kernel's report folder is the one that is named first."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from glasshouse.runtime.__main__ import main
from glasshouse.runtime.roots import sev_snp
from glasshouse.runtime.roots.tsm_reports import TsmReports

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    reports = TsmReports("sev_guest", folder / "report", "glasshouse")
    sev_snp.SevSnpCollector = partial(sev_snp.SevSnpCollector, str(folder / "sev-guest"), reports)
    sys.exit(main(sys.argv[2:], sys.stdin.buffer))
