"""Inputs of the protected leg: opened from a really sealed package, into the caller's own memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from glasshouse.errors import Code, FormatError, PackageError, PlatformError, UsageError
from glasshouse.task.granted import GrantInputs
from glasshouse.task.inputs import FolderInputs, Inputs, lay_out
from glasshouse.task.tensors import load
from glasshouse.task.uncollected import regular_files
from tools.fake_agent import memory_file, sealed_package

LARGE = os.urandom((1 << 20) + 12345)
TENSORS = {
    "matrix": torch.randn(129, 65),
    "half": torch.randn(33, 7).bfloat16(),
    "counts": torch.arange(11),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
}
FILES = {"folder/large.bin": LARGE, "model.safetensors": save(TENSORS), "empty": b""}


@contextmanager
def granted(files: dict[str, bytes], *, tamper: int | None = None) -> Iterator[GrantInputs]:
    package, grant = sealed_package(files, {"seed": 7}, "script")
    if tamper is not None:
        package = package[:tamper] + bytes([package[tamper] ^ 1]) + package[tamper + 1 :]
    secret = memory_file("grant", grant)
    inputs = GrantInputs(secret=secret, secret_bytes=len(grant), package=memory_file("package", package))
    os.close(secret)
    yield inputs
    inputs.close()


@pytest.fixture(params=["raw", "protected"])
def inputs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Inputs]:
    """The same behaviour is asked of both legs."""
    if request.param == "protected":
        with granted(FILES) as opened:
            yield opened
        return
    for name, data in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    yield FolderInputs(tmp_path / "in")


def test_names_and_sizes(inputs: Inputs) -> None:
    assert inputs.names == ("empty", "folder/large.bin", "model.safetensors")
    assert [inputs.size(name) for name in inputs.names] == [len(FILES[name]) for name in inputs.names]
    with pytest.raises(UsageError) as unknown:
        inputs.size("other")
    assert unknown.value.code is Code.FILE_MISSING


def test_reading_anywhere_and_two_at_a_time(inputs: Inputs) -> None:
    with inputs.open("folder/large.bin") as one, inputs.open("folder/large.bin") as two:
        one.seek(1 << 20)
        assert two.read(100) == LARGE[:100]
        assert one.read() == LARGE[1 << 20 :]
    buffer = bytearray(200)
    assert inputs.read_into("folder/large.bin", buffer, (1 << 20) - 100) == 200
    assert buffer == LARGE[(1 << 20) - 100 : (1 << 20) + 100]
    assert inputs.read_into("empty", buffer, 0) == 0


def test_tensors_have_the_bytes_of_the_file(inputs: Inputs) -> None:
    found = load(inputs, "model.safetensors", torch)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_existing_tensors_are_filled_in_place_whatever_their_type(inputs: Inputs) -> None:
    into = {"matrix": torch.zeros(129, 65), "half": torch.zeros(33, 7), "scalar": torch.zeros((), dtype=torch.float64)}
    before = {name: tensor.data_ptr() for name, tensor in into.items()}
    load(inputs, "model.safetensors", torch, into=into)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == before
    for name, tensor in into.items():
        assert torch.equal(tensor, TENSORS[name].to(tensor.dtype)), name


def test_only_some_tensors(inputs: Inputs) -> None:
    assert load(inputs, "model.safetensors", torch, only=["counts"]).keys() == {"counts"}
    with pytest.raises(UsageError, match="nothing"):
        load(inputs, "model.safetensors", torch, only=["nothing"])


def test_a_tensor_of_another_shape_is_refused(inputs: Inputs) -> None:
    with pytest.raises(UsageError, match="shape"):
        load(inputs, "model.safetensors", torch, into={"matrix": torch.zeros(65, 129)})


def test_a_tensor_with_gaps_is_refused(inputs: Inputs) -> None:
    with pytest.raises(UsageError, match="contiguous"):
        load(inputs, "model.safetensors", torch, into={"matrix": torch.zeros(65, 129).t()})


def test_a_file_that_is_no_safetensors_is_refused(inputs: Inputs) -> None:
    with pytest.raises(FormatError):
        load(inputs, "folder/large.bin", torch)


def test_a_changed_package_is_noticed_before_any_byte_is_used() -> None:
    package, _ = sealed_package({"a": LARGE}, {}, "script")
    buffer = bytearray(b"x" * 100)
    with granted({"a": LARGE}, tamper=len(package) - 20) as inputs, pytest.raises(PackageError) as refused:
        inputs.read_into("a", buffer, len(LARGE) - 100)
    assert refused.value.code is Code.PACKAGE_TAMPERED
    assert buffer == bytes(100)


def test_the_grant_brings_the_parameters() -> None:
    with granted({}) as inputs:
        assert inputs.job == {"seed": 7}


def test_files_are_laid_out_as_they_were(inputs: Inputs, tmp_path: Path) -> None:
    lay_out(inputs, inputs.names, tmp_path / "out")
    assert dict(regular_files(tmp_path / "out")).keys() == FILES.keys()
    for name, path in regular_files(tmp_path / "out"):
        assert path.read_bytes() == FILES[name]
        assert path.stat().st_mode & 0o777 == 0o600


class Hostile(FolderInputs):
    """Names that the package room would never let through."""

    def size(self, name: str) -> int:
        return 0


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../b", ""])
def test_a_name_that_leads_out_of_the_workspace_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageError) as refused:
        lay_out(Hostile(tmp_path), [name], tmp_path / "inside")
    assert refused.value.code is Code.PACKAGE_PATH


def test_a_workspace_that_is_too_small_is_out_of_memory_and_no_crash(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PlatformError) as refused:
        lay_out(inputs, ["folder/large.bin"], tmp_path / "out")
    assert refused.value.code is Code.OUT_OF_MEMORY


def test_files_already_there_are_not_overwritten(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "empty").symlink_to("/etc/hostname")
    with pytest.raises(FileExistsError):
        lay_out(inputs, ["empty"], tmp_path)
