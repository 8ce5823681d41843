"""The policies among the examples, and on the pages, are some, of the level that is written beside them."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.jobs.define.hardware_file import read_hardware
from glasshouse.wire.policy import Assurance
from tools.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "hardware"
LISTED = re.findall(
    r"^\| \[([a-z0-9-]+\.toml)\]\(\1\) \| .* \| `([a-z-]+)` \| `([a-z]+)` \|$",
    (EXAMPLES / "README.md").read_text(),
    re.MULTILINE,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples, and the roots of endorsement keys that an owner puts beside them."""
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a maker of TPMs")])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    (tmp_path / "ek-roots.pem").write_bytes(built.sign(key, SHA256()).public_bytes(Encoding.PEM))
    return tmp_path


def test_every_example_of_a_policy_is_listed() -> None:
    assert sorted(name for name, _, _ in LISTED) == sorted(path.name for path in EXAMPLES.glob("*.toml"))
    assert len(LISTED) == 5


@pytest.mark.parametrize(("name", "level", "chain"), LISTED)
def test_an_example_leads_to_its_level_by_its_chain(folder: Path, name: str, level: str, chain: str) -> None:
    policy = read_hardware(folder / name)
    [kind] = set(policy.wanted(Assurance(level))) - {"nvidia"}
    assert getattr(policy, kind.replace("-", "_")).chain == chain


def test_the_policy_of_the_how_to_is_the_example() -> None:
    [shown] = [text for text in blocks("toml", (ROOT / "docs/how-to/dstack.md").read_text()) if "[dstack]" in text]
    assert shown.strip() == (EXAMPLES / "dstack-h100.toml").read_text().partition("\n\n")[2].strip()
