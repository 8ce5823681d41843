"""The layout in which needles lie in secret memory."""

from __future__ import annotations

import os

import pytest

from glasshouse.runtime.keys.needles import NeedleKind, Needles, is_distinctive, region_bytes


def test_needles_are_read_where_they_lie() -> None:
    region, windows = memoryview(bytearray(region_bytes(2))), [os.urandom(32), os.urandom(32)]
    needles = Needles(region)
    assert len(needles) == 0
    needles.add(NeedleKind.PACKAGE_KEY, windows[0])
    needles.add(NeedleKind.ASSET_WINDOW, windows[1])
    found = list(Needles(region))
    assert [kind for kind, _ in found] == [NeedleKind.PACKAGE_KEY, NeedleKind.ASSET_WINDOW]
    assert [bytes(view) for _, view in found] == windows
    assert all(view.obj is region.obj for _, view in found)


def test_a_full_region_and_a_short_needle_are_refused() -> None:
    needles = Needles(memoryview(bytearray(region_bytes(1))))
    with pytest.raises(ValueError, match="does not fit"):
        needles.add(NeedleKind.ASSET_KEY, bytes(31))
    needles.add(NeedleKind.ASSET_KEY, bytes(32))
    with pytest.raises(ValueError, match="does not fit"):
        needles.add(NeedleKind.ASSET_KEY, bytes(32))


def test_only_windows_of_assets_can_be_dropped() -> None:
    needles = Needles(memoryview(bytearray(region_bytes(4))))
    windows = [os.urandom(32) for _ in range(4)]
    kinds = [NeedleKind.ASSET_WINDOW, NeedleKind.PACKAGE_KEY, NeedleKind.ASSET_WINDOW, NeedleKind.HPKE_PRIVATE]
    for kind, window in zip(kinds, windows, strict=True):
        needles.add(kind, window)
    assert needles.drop({0, 1, 3}) == 1
    assert [(kind, bytes(view)) for kind, view in needles] == list(zip(kinds, windows, strict=True))[1:]


@pytest.mark.parametrize(
    ("window", "says"),
    [(bytes(32), False), (b"ab" * 16, False), (bytes(range(31)), False), (bytes(range(32)), True)],
)
def test_what_every_process_holds_says_nothing(window: bytes, says: bool) -> None:
    assert is_distinctive(window) is says
