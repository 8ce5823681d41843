"""The committed vectors of spec/sealed-package.md: each valid one opens, each other one is refused with its code."""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glasshouse.errors import GlasshouseError
from glasshouse.package.content import find, granted_asset, open_stream, verify_content
from glasshouse.package.layout import asset_key
from glasshouse.package.outputs import open_output
from glasshouse.package.read import Package
from glasshouse.package.streams import AssetReader, Positioned
from glasshouse.package.write import Source, write
from glasshouse.wire.crypto import RecipientKey, SigningKey, salted

ROOT = Path(__file__).parents[2] / "spec" / "vectors"
FOLDER = ROOT / "sealed-package"
VECTORS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
if len(VECTORS) < 90:
    raise RuntimeError(f"only {len(VECTORS)} vectors in {FOLDER}")
PACKAGES = [name for name, value in VECTORS.items() if "package" in value]
OUTPUTS = [name for name, value in VECTORS.items() if "output" in value]


def the_package(vector: dict[str, Any]) -> bytes:
    return base64.b64decode(vector["package"], validate=True)


def go_through(vector: dict[str, Any]) -> None:
    """Do what a reader does with a package, up to the stage at which this one is refused."""
    owner = bytes.fromhex(vector["owner_signing"]) if "owner_signing" in vector else None
    key = bytes.fromhex(vector["package_key"])
    package = Package.open(io.BytesIO(the_package(vector)), owner_signing=owner)
    if vector["stage"] == "open":
        return
    index = package.unlock(key)
    if vector["stage"] == "unlock":
        return
    with package.asset(find(index.assets, vector["path"]), key) as reader:
        verify_content(reader)


@pytest.mark.parametrize("name", [name for name in PACKAGES if VECTORS[name]["expect"] != "valid"])
def test_a_hostile_package_is_refused_with_its_code_and_at_its_stage(name: str) -> None:
    vector = VECTORS[name]
    if vector["stage"] != "open":  # what is refused later must pass until then
        Package.open(io.BytesIO(the_package(vector)))
    with pytest.raises(GlasshouseError) as refusal:
        go_through(vector)
    assert refusal.value.code == vector["expect"]


@pytest.mark.parametrize("name", [name for name in PACKAGES if VECTORS[name]["expect"] == "valid"])
def test_a_valid_package_gives_what_the_vector_says(name: str) -> None:
    vector = VECTORS[name]
    key, stream = bytes.fromhex(vector["package_key"]), io.BytesIO(the_package(vector))
    package = Package.open(stream, owner_signing=bytes.fromhex(vector["owner_signing"]))
    assert package.manifest.sha256.hex() == vector["manifest_sha256"]
    assert package.header_sha256.hex() == vector["header_sha256"]
    index = package.unlock(key)
    assert index.job == vector["job"]
    assert [entry.path for entry in index.assets] == [asset["path"] for asset in vector["assets"]]
    granted = package.grant(key, index)
    for entry, asset in zip(index.assets, vector["assets"], strict=True):
        found = asset_key(key, entry.id, package.manifest.suite, package.header_sha256)
        assert found.hex() == asset["asset_key"]
        content = base64.b64decode(asset["content"])
        with AssetReader(granted_asset(granted, Positioned(stream), asset["path"])) as reader:
            verify_content(reader)
            assert open_stream(reader).read() == content
        expected = asset["sha256" if index.version == 1 else "blake3"]
        assert (entry.bytes, entry.digest.hex()) == (asset["bytes"], expected)


WRITTEN = [name for name in PACKAGES if VECTORS[name]["expect"] == "valid" and "version-1" not in name]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_writer_makes_the_vector_byte_for_byte(name: str) -> None:
    vector = VECTORS[name]
    package = Package.open(io.BytesIO(the_package(vector)))
    manifest, out = package.manifest, io.BytesIO()
    contents = {asset["path"]: base64.b64decode(asset["content"]) for asset in vector["assets"]}
    write(
        out,
        sources=[
            Source(path=path, bytes=len(data), open=lambda data=data: io.BytesIO(data))  # type: ignore[misc]
            for path, data in reversed(contents.items())
        ],
        job=vector["job"],
        workload=manifest.workload,
        floor=manifest.floor,
        owner=SigningKey(bytes.fromhex(vector["owner_seed"])),
        owner_sealing=manifest.owner_sealing,
        recipients=manifest.recipients,
        package_key=bytes.fromhex(vector["package_key"]),
        package_id=manifest.package_id,
        suite=manifest.suite,
        chunk_bytes=manifest.chunk_bytes,
    )
    assert out.getvalue() == the_package(vector)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_opens_or_is_refused_with_its_code(name: str) -> None:
    vector = VECTORS[name]
    out = io.BytesIO()

    def open_it() -> None:
        opened = open_output(
            io.BytesIO(base64.b64decode(vector["output"], validate=True)),
            RecipientKey(bytes.fromhex(vector["recipient_private"])),
            run_id=vector["run_id"],
            manifest_sha256=bytes.fromhex(vector["manifest_sha256"]),
        )
        digest = opened.copy_to(out)
        assert [opened.name, opened.kind.value, opened.sequence, digest.hex(), opened.salt.hex()] == [
            vector["name"],
            vector["kind"],
            vector["sequence"],
            vector["sha256"],
            vector["salt"],
        ]
        assert salted(opened.salt, digest).hex() == vector["plaintext_hmac_sha256"]

    if vector["expect"] == "valid":
        open_it()
        assert out.getvalue() == base64.b64decode(vector["content"])
        return
    with pytest.raises(GlasshouseError) as refusal:
        open_it()
    assert refusal.value.code == vector["expect"]


def test_every_refusal_of_the_specification_has_a_vector() -> None:
    specified = (ROOT.parent / "sealed-package.md").read_text(encoding="utf-8").split("## 6.")[1].split("\n- ")[0]
    codes = {
        word.strip("`")
        for line in specified.splitlines()
        if line.startswith("| ") and line.split("|")[1].strip().isdigit()
        for word in line.split("|")[3].replace(",", " ").split()
    }
    assert len(codes) > 10
    assert codes <= {vector["expect"] for vector in VECTORS.values()}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module("generate_package")
    finally:
        sys.path.remove(str(ROOT))


def test_generating_again_gives_the_committed_files(generator: ModuleType) -> None:
    messages = generator.Messages(json.loads(generator.MESSAGES.read_text(encoding="utf-8")))
    made = generator.build(messages)
    committed = {
        str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8")
        for path in FOLDER.rglob("*.json")
        if path != generator.MESSAGES
    }
    assert made == committed
