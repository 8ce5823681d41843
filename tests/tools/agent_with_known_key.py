"""The real agent, whose custodian makes an HPKE key that a test can make again."""

from __future__ import annotations

import sys
from pathlib import Path

from glasshouse.runtime.agent import main

if __name__ == "__main__":
    custodian = Path(__file__).with_name("custodian_with_known_key.py")
    sys.exit(main(sys.argv[1:], sys.stdin.buffer, custodian=str(custodian)))
