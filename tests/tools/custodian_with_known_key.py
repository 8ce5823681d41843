"""The real custodian, with an HPKE key that a test can make again; executed in place of `glasshouse.custodian`.

The key is derived in the custodian, so that the agent's own process never holds it: what is found there is a leak.
"""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasshouse.wire.crypto import RecipientKey

FOLDER = Path(__file__).parents[2] / "src" / "glasshouse" / "custodian"


def known_key() -> RecipientKey:
    from glasshouse.wire.crypto import HPKE_PRIVATE_BYTES, RecipientKey

    return RecipientKey(hashlib.shake_256(b"a key that only tests know").digest(HPKE_PRIVATE_BYTES))


if __name__ == "__main__":
    runpy.run_path(str(FOLDER / "__main__.py"), run_name="custodian")["main"](known_key)
