"""The layout in which patterns lie in secret memory."""

from __future__ import annotations

import os

import pytest

from glasshouse.custodian.residue_patterns import PatternKind, ResiduePatterns, is_distinctive, region_bytes


def test_patterns_are_read_where_they_lie() -> None:
    region, windows = memoryview(bytearray(region_bytes(2))), [os.urandom(32), os.urandom(32)]
    patterns = ResiduePatterns(region)
    assert len(patterns) == 0
    patterns.add(PatternKind.PACKAGE_KEY, windows[0])
    patterns.add(PatternKind.ASSET_WINDOW, windows[1])
    found = list(ResiduePatterns(region))
    assert [kind for kind, _ in found] == [PatternKind.PACKAGE_KEY, PatternKind.ASSET_WINDOW]
    assert [bytes(view) for _, view in found] == windows
    assert all(view.obj is region.obj for _, view in found)


def test_a_full_region_and_a_short_pattern_are_refused() -> None:
    patterns = ResiduePatterns(memoryview(bytearray(region_bytes(1))))
    with pytest.raises(ValueError, match="does not fit"):
        patterns.add(PatternKind.ASSET_KEY, bytes(31))
    patterns.add(PatternKind.ASSET_KEY, bytes(32))
    with pytest.raises(ValueError, match="does not fit"):
        patterns.add(PatternKind.ASSET_KEY, bytes(32))


def test_only_windows_of_assets_can_be_dropped() -> None:
    patterns = ResiduePatterns(memoryview(bytearray(region_bytes(4))))
    windows = [os.urandom(32) for _ in range(4)]
    kinds = [PatternKind.ASSET_WINDOW, PatternKind.PACKAGE_KEY, PatternKind.ASSET_WINDOW, PatternKind.HPKE_PRIVATE]
    for kind, window in zip(kinds, windows, strict=True):
        patterns.add(kind, window)
    assert patterns.drop({0, 1, 3}) == 1
    assert [(kind, bytes(view)) for kind, view in patterns] == list(zip(kinds, windows, strict=True))[1:]


@pytest.mark.parametrize(
    ("window", "says"),
    [(bytes(32), False), (b"ab" * 16, False), (bytes(range(31)), False), (bytes(range(32)), True)],
)
def test_what_every_process_holds_says_nothing(window: bytes, says: bool) -> None:
    assert is_distinctive(window) is says
