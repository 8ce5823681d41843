"""What a worker is shown by default is searched once: tens of thousands of folders, the same for every test here.

The process that looks, its answer and what is done with it stay real. `test_runtime_shown.py` searches each time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glasshouse.runtime.confine import shown_search
from tools.sandboxed import specification

Found = tuple[list[tuple[str, str]], bool]

SEARCH = shown_search.search
USUAL = specification("").read_paths


@pytest.fixture(scope="session")
def found_beneath_the_usual_paths() -> Found:
    return SEARCH(list(USUAL))


@pytest.fixture(autouse=True)
def searched_once(found_beneath_the_usual_paths: Found) -> Iterator[None]:
    def search(paths: list[str]) -> Found:
        return found_beneath_the_usual_paths if tuple(paths) == USUAL else SEARCH(paths)

    # A context of its own: a test's `monkeypatch` is undone before the fixtures that it asked for earlier end.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shown_search, "search", search)
        yield
