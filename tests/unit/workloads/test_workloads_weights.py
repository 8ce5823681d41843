"""Sealed weights opened where the tensors are: into them, across their borders, and not at all when changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save

pytest.importorskip("triton")

from glasshouse.collectives.kernels.cipher import Cipher
from glasshouse.errors import Code, PackageError, UsageError
from glasshouse.package.index import INDEX_ID
from glasshouse.package.streams import AssetReader, SealedAsset
from glasshouse.task.granted import GrantInputs
from glasshouse.task.tensors import load
from glasshouse.wire.crypto import Suite
from glasshouse.workloads.builtin import weights
from glasshouse.workloads.builtin.weights import DeviceOpener
from simulators.emulated_gpu import emulated_cipher, emulated_gpu
from tools.fake_agent import memory_file, sealed_package

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with emulated_gpu():
        yield


CHUNK = 1024
TENSORS = {
    "a.matrix": torch.randn(20, 17),  # across chunks, and begins in the one that holds the header
    "b.half": torch.randn(3, 5).bfloat16(),
    "c.empty": torch.empty(0, 4),
    "d.flags": torch.tensor([True, False, True]),
    "e.large": torch.randn(300).half(),
    "f.scalar": torch.tensor(2.5),
}
FILES = {"base/model.safetensors": save(TENSORS), "data.txt": b"other"}


@pytest.fixture
def cipher() -> Cipher:
    return emulated_cipher()


@contextmanager
def granted(*, suite: Suite = Suite.CHACHA20_POLY1305, flip: int | None = None) -> Iterator[GrantInputs]:
    """Open a really sealed package; `flip` counts its bytes from the end."""
    package, grant = sealed_package(FILES, {}, "script", suite=suite, chunk_bytes=CHUNK)
    if flip is not None:
        changed = bytearray(package)
        changed[-flip] ^= 1
        package = bytes(changed)
    secret = memory_file("grant", grant)
    inputs = GrantInputs(secret=secret, secret_bytes=len(grant), package=memory_file("package", package))
    os.close(secret)
    yield inputs
    inputs.close()


@pytest.fixture
def no_host_plaintext(monkeypatch: pytest.MonkeyPatch) -> None:
    real = AssetReader._open

    def forbidden(reader: AssetReader, index: int, out: memoryview) -> None:
        assert reader.asset.entry.id == INDEX_ID, "a chunk was opened in host memory"
        real(reader, index, out)

    monkeypatch.setattr(AssetReader, "_open", forbidden)


@pytest.mark.usefixtures("no_host_plaintext")
def test_tensors_have_the_bytes_of_the_file(cipher: Cipher, capfd: pytest.CaptureFixture[str]) -> None:
    with granted() as inputs:
        opener = DeviceOpener(cipher, window_bytes=2 * CHUNK + 40)  # two chunks a launch
        found = load(inputs, "base/model.safetensors", torch, opener=opener)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert capfd.readouterr().err == "glasshouse: weights are opened on the GPU\n"


@pytest.mark.usefixtures("no_host_plaintext")
def test_only_some_and_into_tensors_of_another_type_or_order(cipher: Cipher) -> None:
    into = {"a.matrix": torch.zeros(20, 17, dtype=torch.float64), "e.large": torch.zeros(600)[::2]}
    with granted() as inputs:
        opener = DeviceOpener(cipher)
        assert load(inputs, "base/model.safetensors", torch, into=into, opener=opener).keys() == into.keys()
        for name, tensor in into.items():
            assert torch.equal(tensor, TENSORS[name].to(tensor.dtype)), name
        with pytest.raises(UsageError, match="shape"):
            load(inputs, "base/model.safetensors", torch, into={"f.scalar": torch.zeros(2)}, opener=opener)


def test_a_changed_chunk_zeroes_every_tensor_and_is_named(cipher: Cipher) -> None:
    # The last asset, "data.txt", takes 5 + 16 bytes: this byte lies in the last chunk of the weights.
    into = {name: torch.ones_like(tensor) for name, tensor in TENSORS.items()}
    into["a.matrix"] = torch.ones(20, 17, dtype=torch.float64)
    with granted(flip=21 + 17) as inputs, pytest.raises(PackageError) as refused:
        load(inputs, "base/model.safetensors", torch, into=into, opener=DeviceOpener(cipher, window_bytes=1))
    assert refused.value.code is Code.PACKAGE_TAMPERED
    assert "chunk" in refused.value.message
    assert not any(tensor.any() for tensor in into.values())


def test_chunks_are_not_taken_for_one_another(cipher: Cipher, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SealedAsset.read_sealed
    monkeypatch.setattr(
        SealedAsset,
        "read_sealed",
        lambda self, chunk, out: original(self, 1 if self.entry.id != INDEX_ID and chunk == 0 else chunk, out),
    )
    with granted() as inputs, pytest.raises(PackageError) as refused:
        load(inputs, "base/model.safetensors", torch, opener=DeviceOpener(cipher))
    assert refused.value.code is Code.PACKAGE_TAMPERED


def test_a_package_of_the_other_suite_is_opened_in_host_memory_and_the_log_says_so(
    cipher: Cipher, capfd: pytest.CaptureFixture[str]
) -> None:
    with granted(suite=Suite.AES_256_GCM) as inputs:
        found = load(inputs, "base/model.safetensors", torch, opener=DeviceOpener(cipher))
    assert torch.equal(found["a.matrix"], TENSORS["a.matrix"])
    assert "in host memory: the package's suite is AES-256-GCM" in capfd.readouterr().err


def test_without_a_gpu_the_log_says_so_and_with_a_broken_one_too(
    cipher: Cipher, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with granted() as inputs:
        found = load(inputs, "base/model.safetensors", torch, opener=weights.opener(torch.device("cpu")))
        assert torch.equal(found["a.matrix"], TENSORS["a.matrix"])
        assert "in host memory: the device is cpu" in capfd.readouterr().err
        # Nothing that calls itself a GPU here: whatever goes wrong, the weights are opened all the same.
        sealed = inputs.sealed("data.txt")
        assert not weights.opener(torch.device("cuda")).opens(sealed)
        assert "in host memory: the GPU's kernels cannot be built here (" in capfd.readouterr().err


def test_kernels_are_tried_before_they_are_trusted(cipher: Cipher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights._works(cipher)

    class Yes:
        def wait(self) -> tuple[bool, ...]:
            return (True,)

    monkeypatch.setattr(cipher, "open", lambda messages: Yes())
    assert not weights._works(cipher)
