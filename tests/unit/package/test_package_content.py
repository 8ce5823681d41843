"""The hash of an asset's digest: by the package's version, and loaded only where a whole asset is hashed."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from blake3 import blake3

from glasshouse.package.read import Package
from glasshouse.package.write import Source, write
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse.wire.policy import Assurance, Floor, Profile

_KEYS = """
import sys
import glasshouse.runtime.__main__, glasshouse.runtime.run.lifecycle
import glasshouse.runtime.keys.custodian, glasshouse.package.grant
print([name for name in sys.modules if name.partition(".")[0] == "blake3"])
"""


def test_what_holds_keys_on_the_rented_machine_does_not_load_the_native_hash() -> None:
    command = [sys.executable, "-I", "-B", "-c", _KEYS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_digest_in_the_index_is_the_one_that_b3sum_prints() -> None:
    content, key, owner = os.urandom(5000), os.urandom(32), SigningKey.generate()
    recipient, out = RecipientKey.generate().public, io.BytesIO()
    write(
        out,
        sources=[Source(path="data", bytes=len(content), open=lambda: io.BytesIO(content))],
        job={},
        workload="script",
        floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD),
        owner=owner,
        owner_sealing=recipient,
        recipients=[recipient],
        package_key=key,
        package_id=os.urandom(16).hex(),
    )
    package = Package.open(io.BytesIO(out.getvalue()))
    assert package.manifest.version == 2
    (entry,) = package.unlock(key).assets
    assert entry.digest == blake3(content).digest()
