"""The real agent, whose custodian makes an HPKE key that a test can make again.

The key is derived inside the custodian, so that the agent's own process never holds it: what is found
there would be a leak.
"""

from __future__ import annotations

import hashlib
import sys

from glasshouse.runtime.agent import main
from glasshouse.wire.hpke import PRIVATE_BYTES, RecipientKey


def known_key() -> RecipientKey:
    return RecipientKey(hashlib.shake_256(b"a key that only tests know").digest(PRIVATE_BYTES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer, make_key=known_key))
