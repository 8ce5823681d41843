"""How much memory opening takes beyond the destination: two chunks, whatever the size. Measured by the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulators.package_world import CHUNK, seal

SIZE = 96 << 20

# Runs in a process of its own, so that nothing else moves its peak.
PROGRAM = """
import io, json, sys
from pathlib import Path
from glasshouse.package.grant import Grant
from glasshouse.task.tensors import tensor_spans
from glasshouse.package.content import granted_asset
from glasshouse.package.streams import AssetReader, Positioned

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

def settle():
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    return peak()

mode, package = sys.argv[1], Positioned(open(sys.argv[2], "rb"))
grant = Grant.parse(Path(sys.argv[3]).read_bytes())
if mode == "bytes":
    size = grant.assets[0].bytes
    destination = bytearray(b"\\x01") * size
    before = settle()
    with AssetReader(granted_asset(grant, package, "w")) as reader:
        assert reader.read_into(0, destination) == size
else:
    import torch
    reader = AssetReader(granted_asset(grant, package, "w"))
    spans = tensor_spans(reader)
    tensors = {span.name: torch.ones(span.shape, dtype=torch.bfloat16) for span in spans}
    before = settle()
    for span in spans:
        reader.read_into(span.offset, tensors[span.name].view(-1).view(torch.uint8).numpy())
    assert all(float(tensor.view(-1)[0]) == 2.0 for tensor in tensors.values())
print(json.dumps(peak() - before))
"""


def extra_memory(mode: str, folder: Path, content: bytes) -> int:
    from simulators.package_world import KEY, unlock

    data, _ = seal({"w": content}, chunk_bytes=1 << 20)
    package, index = unlock(data)
    (folder / "p.sealed").write_bytes(data)
    (folder / "grant").write_bytes(package.grant(KEY, index).encode())
    arguments = [sys.executable, "-c", PROGRAM, mode, str(folder / "p.sealed"), str(folder / "grant")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this kernel has no /proc/self/clear_refs")
def test_reading_takes_a_few_mebibytes_whatever_the_size(tmp_path: Path) -> None:
    assert extra_memory("bytes", tmp_path, bytes(SIZE)) < 8 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this kernel has no /proc/self/clear_refs")
def test_weights_reach_their_tensors_without_a_second_copy(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save
    weights = {f"layer{number}": torch.full((SIZE // 12,), 2.0, dtype=torch.bfloat16) for number in range(6)}
    # The bar is 64 MiB; a whole copy of these weights would be 96.
    assert extra_memory("tensors", tmp_path, save(weights)) < 8 << 20


def test_sealing_takes_five_chunks_whatever_the_size() -> None:
    import io
    import tracemalloc

    from glasshouse.package.write import Source

    class Zeros(io.RawIOBase):
        def __init__(self, size: int) -> None:
            self.left = size

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object, /) -> int:
            view = memoryview(buffer)  # type: ignore[arg-type]
            count = min(len(view), self.left)
            self.left -= count
            return count

    class Nowhere(io.BytesIO):
        def write(self, data: object, /) -> int:
            return len(data)  # type: ignore[arg-type]

    size = 24 << 20
    tracemalloc.start()
    try:
        seal(
            sources=[Source(path="w", bytes=size, open=lambda: Zeros(size))],  # type: ignore[arg-type, return-value]
            out=Nowhere(),
            chunk_bytes=1 << 20,
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert CHUNK < peak < 6 << 20


def test_a_failed_read_wipes_a_large_destination_without_a_second_one() -> None:
    import tracemalloc

    from glasshouse.errors import PackageError
    from simulators.package_world import reader, unlock

    data, _ = seal({"w": bytes(24 << 20)}, chunk_bytes=1 << 20)
    _, index = unlock(data)
    spoiled = bytearray(data)
    spoiled[index.assets[0].offset + (23 << 20)] ^= 1
    asset = reader(bytes(spoiled), "w")
    destination = bytearray(b"\x01") * (24 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(PackageError):
            asset.read_into(0, destination)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert destination.count(0) == len(destination)
