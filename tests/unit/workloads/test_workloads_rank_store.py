"""The store of ranks that inherit their connection: what it does, also beneath torch, and what it bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.workloads.distributed import rank_store
from simulators.rank_places import JOINED, PATIENCE_S, PairPlace


@pytest.fixture
def place(tmp_path: Path) -> Iterator[PairPlace]:
    place = PairPlace(tmp_path)
    with place.server:
        yield place
    place.close()


def test_ranks_share_a_store_that_does_what_tcpstore_does(place: PairPlace) -> None:
    one = place.start(JOINED + "print(asked('get', 'word'), asked('wait', 'word', 'count'))", rank=1)
    code = """
print(asked("check", "word"), asked("add", "count", amount=5), asked("add", "count", amount=-7), asked("get", "count"))
print(asked("compare", "word", expected="", value="YQ"), asked("compare", "word", expected="Yg", value="Yw"))
print(asked("append", "word", value="Yg"), asked("compare", "none", expected="Yg", value="Yw"))
print(asked("count"), asked("delete", "none"), asked("add", "word", amount=1))
print(said(lambda: asked("get", "never", limit_s=0.1)), said(lambda: asked("wait", "word", "never", limit_s=0.1)))
"""
    assert place.say(JOINED + code, rank=0) == [
        "{'count': 0} {'count': 5} {'count': -2} {'value': 'LTI'}",
        "{'value': 'YQ'} {'value': 'YQ'}",
        "{'value': 'Yg'} {'value': 'Yg'}",
        "{'count': 2} {'count': 0} {'refused': 'what stands in the store is no number to add to'}",
        "Empty Empty",
    ]
    found = one.communicate(timeout=PATIENCE_S)[0].strip()
    assert found in ("{'value': 'YQ'} {}", "{'value': 'YWI'} {}"), "whichever stood there when it asked"
    assert not place.server._store._waiting, "a question that nobody waits for is taken back"


TORCH = """
from datetime import timedelta
import torch.distributed as dist
from glasshouse.workloads.distributed.torch_store import ChannelStore
store = ChannelStore(channel)
store.set_timeout(timedelta(seconds=100))
under = dist.PrefixStore("group", store)
rank = channel.rank
under.set(f"rank-{rank}", bytes([rank, 0, 255]))
print([under.get(f"rank-{other}") for other in range(2)], store.get("group/rank-0"))
under.wait(["rank-0", "rank-1"], timedelta(seconds=100))
under.add("sum", 2 ** 40)
under.add("done", 1)
while under.add("done", 0) < 2:
    time.sleep(0.01)
print(under.get("sum"), under.check(["sum"]), under.check(["sum", "none"]), under.num_keys() >= 4)
if rank == 0:
    print(under.compare_set("swap", "", "first"), under.compare_set("swap", "first", "next"), under.delete_key("swap"))
    under.append("text", "ab"); under.append("text", b"cd")
    under.multi_set(["x", "y"], ["1", "2"])
    print(under.multi_get(["text", "x", "y"]), under.has_extended_api(), under.clone().get("x"))
    for action in (lambda: under.wait(["never"], timedelta(milliseconds=100)), lambda: under.set("big", "x" * 20_000)):
        try:
            action()
        except Exception as error:
            print(type(error).__name__, str(error)[:24])
"""


def test_torch_works_with_that_store_also_under_a_prefix(place: PairPlace) -> None:
    other = place.start(JOINED + TORCH, rank=1)
    lines = place.say(JOINED + TORCH, rank=0)
    first = [
        r"[b'\x00\x00\xff', b'\x01\x00\xff'] b'\x00\x00\xff'",
        f"b'{2**41}' True False True",
    ]
    assert lines == [
        *first,
        "b'first' b'next' True",
        "[b'abcd', b'1', b'2'] True b'1'",
        "DistStoreError wait timeout after 0.1 s",
        "ValueError a value of 20000 bytes: ",
    ]
    assert other.communicate(timeout=PATIENCE_S)[0].splitlines() == first


def test_the_store_bounds_what_it_keeps_and_says_so(place: PairPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_MOST_VALUES", 2)
    monkeypatch.setattr(rank_store, "_MOST_WAITING", 2)
    code = """
print([list(asked("set", key, value="YQ")) for key in ("a", "b", "a", "c")])
print(list(asked("append", "a", value="YQ" * 10_000)))
for number in (901, 902):
    channel._link.send({"type": "store", "id": number, "keys": ["never"], "what": "wait"})
print(asked("wait", "never"))
"""
    assert place.say(JOINED + code) == [
        "[['value'], ['value'], ['value'], ['refused']]",
        "['value']",
        "{'refused': 'more questions to the store at once than it keeps'}",
    ]
    big = "print(asked('append', 'a', value='YWFh' * 3_000), asked('get', 'b'))"
    assert place.say(JOINED + big)[0].startswith("{'refused': 'the store takes")


def test_what_one_rank_waits_for_takes_nothing_of_anothers_bound(
    place: PairPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_store, "_MOST_WAITING", 1)
    waiting = place.start(JOINED + "channel._link.send({'type': 'store', 'id': 901, 'keys': ['word'], 'what': 'wait'});"
                          "print(asked('wait', 'word'), flush=True); sys.stdin.readline()", rank=1)  # fmt: skip
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "{'refused': 'more questions to the store at once than it keeps'}\n"
    assert place.say(JOINED + "print(said(lambda: asked('wait', 'word', limit_s=0.1)))") == ["Empty"]


def test_the_store_bounds_its_bytes_together(place: PairPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_MOST_BYTES", 7)
    code = "print([list(asked('set', key, value='YWFh')) for key in ('a', 'b', 'a', 'c')])"
    freed = "; print(asked('delete', 'a'), list(asked('set', 'c', value='YWFh')))"
    assert place.say(JOINED + code + freed) == [
        "[['value'], ['value'], ['value'], ['refused']]",
        "{'count': 1} ['value']",
    ]
