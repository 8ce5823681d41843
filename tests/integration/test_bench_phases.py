"""Phases of real steps, raw and protected: the parts add up to the slice, and the owner can check what was signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.bench.overhead.artifact import load_phases
from glasshouse.bench.overhead.design import Arm
from simulators.command_line import Shell

pytestmark = pytest.mark.slow


def test_the_phases_of_a_real_step_add_up_in_both_arms(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    arguments = ("--workload", "mlp", "--device", "cpu", "--blocks", "2", "--warmup", "1s", "-o", "out", "--json")
    answer = shell.ask("bench", "phases", *arguments, timeout_s=120)
    assert answer.code == 0
    shown = answer.object["phases"]
    assert (shown["bound"]["word"], shown["bound"]["reason"]) == ("host", "no-device")
    assert (shown["checkpoints"], shown["ended_by"]) == ("none-made", None)
    assert 0 <= shown["hooks_share"] < 1
    found = load_phases(shell.folder / "out")
    assert found is not None
    assert found.to_json()["arms"] == shown["arms"]
    stamped = [one for one in found.slices if one.stamped]
    assert len(found.slices) == 8
    assert len(stamped) == 4
    for one in stamped:
        assert one.phases is not None
        assert one.phases.keys() == {"forward", "backward", "optimizer"}
        assert all(spent > 0 for spent in one.phases.values())
        # What no stamp covers is the report of a step and the loop itself.
        assert 0 <= one.duration_ns - sum(one.phases.values()) < one.duration_ns / 2
    for one in found.slices:
        assert one.cpu_ns is not None
        assert one.cpu_ns > 0
        assert one.rss_bytes is not None
        assert one.rss_bytes > 50 << 20
        assert (one.device_bytes, one.energy_mj, one.wait_ppm) == (None, None, None)
    assert found.arms.keys() == set(Arm)
    assert (shell.folder / "out" / "figures" / "phases.svg").is_file()
    checked = shell.ask("verify", "out", "--owner", "out/owner.pub", "--json")
    assert checked.code == 0
    assert [link["link"] for link in checked.object["links"] if link["holds"]] == ["statement", "phases"]
    assert "the phases of a step only, of which no word is claimed" in checked.object["verdict"]
