"""The shape of the sources: short files, small wings, no circle of imports, public names with docstrings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import glasshouse

SOURCES = Path(glasshouse.__file__).parent
FILES = {path.relative_to(SOURCES): path.read_text() for path in SOURCES.rglob("*.py")}
MAX_LINES, MAX_FILES, MAX_DEPTH, DOCUMENTED = 350, 12, 16, 0.95
# Of other bases a method may say nothing because theirs does.
OWN_METHODS = {"Record", "Protocol", "Enum", "IntEnum", "StrEnum", "NamedTuple"}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each module imports."""
    built = grimp.build_graph("glasshouse", cache_dir=None)
    return {module: built.find_modules_directly_imported_by(module) for module in built.modules}


def test_files_are_short_and_wings_are_small() -> None:
    assert len(FILES) > 100
    lines = {str(path): len(text.splitlines()) for path, text in FILES.items()}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}
    wings = Counter(str(path.parent) for path in FILES if path.name != "__init__.py")
    assert {wing: count for wing, count in wings.items() if count > MAX_FILES} == {}


def test_imports_have_no_circle_and_no_long_chain(graph: dict[str, set[str]]) -> None:
    depth: dict[str, int] = {}
    for module in TopologicalSorter(graph).static_order():  # raises where there is a circle
        depth[module] = 1 + max((depth[one] for one in graph[module]), default=0)
    assert max(depth.values()) <= MAX_DEPTH


def _public(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and one.name[0] != "_":
            if not any(isinstance(mark, ast.Attribute) and mark.attr == "setter" for mark in one.decorator_list):
                yield one
            if isinstance(one, ast.ClassDef) and {ast.unparse(base) for base in one.bases} <= OWN_METHODS:
                yield from _public(one)


def test_public_names_have_docstrings() -> None:
    named = [
        (f"{path}:{one.name}", ast.get_docstring(one))
        for path, text in FILES.items()
        for one in _public(ast.parse(text))
    ]
    missing = [name for name, docstring in named if not docstring]
    assert len(missing) <= (1 - DOCUMENTED) * len(named), missing
