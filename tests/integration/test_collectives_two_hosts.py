"""Training across two hosts over a wire that is tapped, and through somebody in the middle who does what he can.

Two network namespaces with addresses of their own, two ranks on each; real processes, sockets, packets and DDP. Where
this machine lets nobody make namespaces the tests are skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code
from tools.two_host_jobs import PATIENT
from tools.two_hosts import GROUP_SECRET, SIZE, TwoHosts, unavailable
from tools.wire_capture import WINDOW_BYTES, blocks_found

pytestmark = pytest.mark.slow

SECRETS = ("data", "gradients", "parameters")
PATIENCE_S = 6.0
"""The group's timeout where an attack can only be told by it."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with TwoHosts() as world:
        yield world


def plaintexts(folder: Path, kind: str) -> list[bytes]:
    """What the ranks held of one kind in all the job's time."""
    found = [path.read_bytes() for path in sorted(folder.glob(f"{kind}-*.plain"))]
    assert len(found) == SIZE
    return found


def packets(folder: Path) -> list[bytes]:
    """Everything that went over any interface of either host, the loopback too."""
    found = [path.read_bytes() for path in sorted(folder.glob("*.packets"))]
    assert len(found) == 2
    return found


def trained(hosts: TwoHosts, folder: Path, backend: str) -> None:
    """Run the training job; every rank ends with the same model, and no packet was missed."""
    played = hosts.run("train", folder, backend=backend)
    assert [rank.get("others") for rank in played["ranks"]] == [0] * SIZE, played
    assert len({rank["digest"] for rank in played["ranks"]}) == 1
    assert all(tap["dropped"] == 0 and tap["bytes"] > 1 << 20 for tap in played["taps"]), played["taps"]


def test_nobody_who_taps_the_wire_sees_a_block_of_parameters_gradients_or_data(hosts: TwoHosts, tmp_path: Path) -> None:
    trained(hosts, tmp_path, "sealed")
    captured = packets(tmp_path)
    for kind in SECRETS:
        assert blocks_found(plaintexts(tmp_path, kind), captured) == 0, kind
    for secret in (GROUP_SECRET, (PATIENT % 7).encode()):
        assert blocks_found([secret[:WINDOW_BYTES], secret[-WINDOW_BYTES:], secret], captured) == 0


def test_the_same_search_finds_all_of_them_where_nothing_is_sealed(hosts: TwoHosts, tmp_path: Path) -> None:
    """Without this the test above could not fail."""
    trained(hosts, tmp_path, "gloo")
    captured = packets(tmp_path)
    for kind in SECRETS:
        assert blocks_found(plaintexts(tmp_path, kind), captured) > 1000, kind
    assert blocks_found([(PATIENT % 7).encode()], captured) > 0


def told(played: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank said; every one of them ended by itself, with an error."""
    ranks: list[dict[str, Any]] = played["ranks"]
    assert played["struck"] is True, "the attack found nothing to strike at"
    assert [rank.get("rank") for rank in ranks] == list(range(SIZE)), ranks
    assert all(rank.get("code") or rank.get("message") for rank in ranks), ranks
    return ranks


# The rank that finds it, whom it names, and how it calls what was done.
CHANGED, MOVED = "changed on the way", "dropped, repeated, reordered or put in"
ATTACKS = {
    "flip": (0, "rank 2", CHANGED),
    "flip-header": (0, "rank 2", CHANGED),
    "drop": (0, "rank 2", MOVED),
    "repeat": (0, "rank 2", MOVED),
    "reorder": (0, "rank 2", MOVED),
    "overtake": (0, "rank 2", "reordered"),
    "reflect": (2, "rank 0", ""),  # the one or the other, by how many frames rank 0 has sent
    "splice": (0, "rank 2", CHANGED),
    "inject": (0, "rank 2", CHANGED),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_whoever_touches_a_frame_ends_the_job_and_changes_nothing(hosts: TwoHosts, tmp_path: Path, attack: str) -> None:
    finder, culprit, how = ATTACKS[attack]
    ranks = told(hosts.run("loop", tmp_path, attack=attack))
    assert {rank["code"] for rank in ranks} == {Code.COLLECTIVE_TAMPERED.value}
    refused = {rank["rank"] for rank in ranks if rank["message"].startswith("the group is over: ")}
    for rank in ranks:
        # What was unfinished is zero on every rank; what was asked of a group that was over did not begin.
        assert rank["output"] == ("own" if rank["rank"] in refused else "zeros"), rank
    assert finder not in refused
    found = ranks[finder]["message"]
    assert f"from {culprit} " in found
    assert how in found
    assert "operation 6" in found
    assert "all_reduce(sum) of 1048576 float32" in found
    assert ranks[finder]["step"] == 6
    assert {f"rank {rank['about']}" for rank in ranks} == {culprit}, "every rank is told whose frames it is about"
    for rank in ranks:
        # One step earlier, if the end was faster than the last of what others sent for that step; one step later,
        # if this rank had the attacked step whole.
        assert rank["step"] in (5, 6, 7), rank
        assert how in rank["message"]
        assert rank["rank"] == finder or f"rank {finder} ended the group" in rank["message"]


MESSAGES = {"flip-message": CHANGED, "repeat-accept": MOVED, "repeat-offer": MOVED}


@pytest.mark.parametrize("attack", MESSAGES)
def test_whoever_touches_a_message_between_two_ranks_ends_the_job(hosts: TwoHosts, tmp_path: Path, attack: str) -> None:
    ranks = told(hosts.run("post", tmp_path, attack=attack))
    assert {rank["code"] for rank in ranks} == {Code.COLLECTIVE_TAMPERED.value}
    assert all(rank["sound"] for rank in ranks), ranks
    assert "came from rank 2 is not what it sealed" in ranks[0]["message"]
    assert all(MESSAGES[attack] in rank["message"] for rank in ranks)


def test_whoever_holds_everything_back_only_makes_the_job_end_in_time(hosts: TwoHosts, tmp_path: Path) -> None:
    ranks = told(hosts.run("loop", tmp_path, attack="silence", timeout_s=PATIENCE_S))
    assert {rank["code"] for rank in ranks} <= {Code.COLLECTIVE_TIMEOUT.value, Code.RANK_LOST.value}
    assert Code.COLLECTIVE_TIMEOUT.value in {rank["code"] for rank in ranks}
    assert all(rank["output"] == "zeros" for rank in ranks), ranks
    assert all("all_reduce(sum) of 1048576 float32" in rank["message"] for rank in ranks)


def test_an_attack_ends_training_and_leaves_the_model_as_it_was(hosts: TwoHosts, tmp_path: Path) -> None:
    """Through DDP: the reducer's own future carries the error, and no parameter takes a step with what was sent."""
    ranks = told(hosts.run("train-attacked", tmp_path, attack="flip"))
    for rank in ranks:
        assert rank["model_untouched"] is True
        assert Code.COLLECTIVE_TAMPERED.value in rank["message"]
        assert "rank 2" in rank["message"]


def test_an_attacker_without_the_secret_cannot_take_a_ranks_place(hosts: TwoHosts, tmp_path: Path) -> None:
    ranks = told(hosts.run("idle", tmp_path, attack="impostor", timeout_s=PATIENCE_S))
    assert ranks[2]["code"] == Code.GROUP_MISMATCH.value
    assert "calls itself rank 0 holds another group secret" in ranks[2]["message"]
    others = {rank["code"] for rank in ranks if rank["rank"] != 2}
    assert others <= {Code.RANK_LOST.value, Code.COLLECTIVE_TIMEOUT.value, Code.GROUP_MISMATCH.value}


def test_hellos_of_an_earlier_job_are_found_out_even_with_the_same_secret(hosts: TwoHosts, tmp_path: Path) -> None:
    first = hosts.run("idle", tmp_path, attack="replay", kept=str(tmp_path))
    assert [rank["rank"] for rank in first["ranks"]] == list(range(SIZE)), first
    assert not any("code" in rank for rank in first["ranks"]), first
    ranks = told(hosts.run("idle", tmp_path, attack="replay", kept=str(tmp_path), timeout_s=PATIENCE_S))
    assert Code.COLLECTIVE_TAMPERED.value in {rank["code"] for rank in ranks}
    assert any("a hello was changed or repeated" in rank["message"] for rank in ranks)


def test_a_store_that_lies_about_addresses_gains_nothing(hosts: TwoHosts, tmp_path: Path) -> None:
    ranks = told(hosts.run("idle", tmp_path, attack="reroute", timeout_s=PATIENCE_S))
    assert Code.COLLECTIVE_TAMPERED.value in {rank["code"] for rank in ranks}
    assert any("rerouted or reflected between the ranks" in rank["message"] for rank in ranks)


def test_a_store_that_falls_silent_only_makes_the_job_end_in_time(hosts: TwoHosts, tmp_path: Path) -> None:
    ranks = told(hosts.run("idle", tmp_path, attack="mute-store", timeout_s=PATIENCE_S))
    assert {rank["code"] for rank in ranks} <= {Code.COLLECTIVE_TIMEOUT.value, Code.RANK_LOST.value}


def test_whoever_only_passes_everything_on_is_not_noticed(hosts: TwoHosts, tmp_path: Path) -> None:
    """The middle itself breaks nothing: what ends the jobs above is what it does."""
    played = hosts.run("loop", tmp_path, attack="none")
    assert [rank.get("step") for rank in played["ranks"]] == [12] * SIZE, played
    assert not any("code" in rank for rank in played["ranks"]), played
