"""What collects the evidence of NVIDIA's GPUs, by libraries as a driver has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.roots.nvidia import NvidiaCollector
from simulators.nvidia_machine import NvidiaMachine
from tools.driver_libraries import DriverLibraries

BOUND = NvidiaMachine().bound()


@pytest.mark.parametrize(("gpus", "switches"), [(1, 0), (8, 4)])
def test_what_the_libraries_give_is_accepted(tmp_path: Path, gpus: int, switches: int) -> None:
    machine = NvidiaMachine(gpus=gpus, switches=switches)
    collector = DriverLibraries(machine=machine, folder=tmp_path, nonce=BOUND.gpu_nonce).collector()
    assert collector.look() == ""
    assert collector.prepare() is None
    blob = collector.collect(bound=machine.bound(), credential=None)
    collector.close()
    found = machine.appraise(blob)
    assert len(found.claims["gpus"]) == gpus  # type: ignore[arg-type]
    # The order of GPUs and switches is the driver's, so the evidence is what the machine itself gives.
    assert len(blob) == pytest.approx(len(machine.blob()), abs=200)


@pytest.mark.parametrize(
    ("words", "switches", "sentence"),
    [
        ({"FEATURE": 0}, 0, "is off"),
        ({"STATE": 3}, 0, "is off"),  # a GPU or driver without it
        ({"DEVTOOLS": 1}, 0, "developer tools"),
        ({"MULTI": 7}, 0, "is off"),  # a mode of later drivers is none that is known
        ({"OLD": 1}, 0, "too old"),
        ({"STATE": 999}, 0, "does not answer"),
        ({}, 2, "does not answer"),  # switches, without the library that reads them
    ],
    ids=str,
)
def test_a_machine_that_gives_none_says_why(
    tmp_path: Path, words: dict[str, int], switches: int, sentence: str
) -> None:
    collector = DriverLibraries(
        machine=NvidiaMachine(gpus=2, switches=switches),
        folder=tmp_path,
        nonce=BOUND.gpu_nonce,
        words=words,
        has_switch_library=False,
    ).collector()
    assert sentence in collector.look()
    with pytest.raises(PlatformError, match=sentence) as refused:
        collector.collect(bound=BOUND, credential=None)
    assert refused.value.code is Code.HARDWARE_UNAVAILABLE


def test_a_driver_before_settings_had_their_call_protects_each_gpu_by_itself(tmp_path: Path) -> None:
    machine = NvidiaMachine()
    libraries = DriverLibraries(machine=machine, folder=tmp_path, nonce=BOUND.gpu_nonce, words={"MULTI": -1})
    assert machine.appraise(libraries.collector().collect(bound=BOUND, credential=None)).claims["mode"] == "spt"


def test_a_library_that_fails_midway_gives_nothing(tmp_path: Path) -> None:
    node = NvidiaMachine(gpus=2, switches=2)
    collector = DriverLibraries(machine=node, folder=tmp_path, nonce=bytes(32)).collector()
    with pytest.raises(PlatformError, match="gave no evidence"):  # NVML: another nonce
        collector.collect(bound=BOUND, credential=None)
    (tmp_path / "nonce-0").write_bytes(BOUND.gpu_nonce)
    (tmp_path / "switch-chain-1").write_bytes(b"no certificates")
    with pytest.raises(PlatformError, match="gave no evidence"):
        collector.collect(bound=BOUND, credential=None)


def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    collector = NvidiaCollector(library="/nonexistent", folder=str(tmp_path))
    assert collector.look() == "no GPU of NVIDIA's is in sight"
    (tmp_path / "nvidia0").touch()
    assert "does not answer" in collector.look()
