"""The real agent, whose custodian makes an HPKE key that a test can make again; leaves the list of its own modules."""

from __future__ import annotations

import sys
from pathlib import Path

from glasshouse.runtime.__main__ import main

if __name__ == "__main__":
    custodian = Path(__file__).with_name("custodian_with_known_key.py")
    code = main(sys.argv[1:], sys.stdin.buffer, custodian=str(custodian))
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    out.with_name(f"{out.name}-modules").write_text("\n".join(sorted(sys.modules)))
    sys.exit(code)
