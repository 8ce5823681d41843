"""Lines of code by what they are trusted with: ``make count``; ``--check`` fails where a tier has outgrown its ceiling.

A tier is what its program can import, followed through the sources, without blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"
_COLLECTORS = SOURCES / "glasshouse" / "runtime" / "roots"
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Programs that are trusted with the same.

    Attributes:
        held: what with.
        roots: the modules that they begin with.
        ceiling: what `--check` allows: what was reached, and a fiftieth more.
    """

    held: str
    roots: tuple[str, ...]
    ceiling: int


TIERS = (
    # An eighth is for lines: the key of their checkpoints is made of the package key, and a release opens beside one
    # checkpoint alone, so that no other process may open either.
    Tier(held="the package key (custodian)", roots=("glasshouse.custodian.__main__",), ceiling=2103),
    # A tenth is for lines: checkpoints are sealed here, sent and read again, and nothing else may send for a run. What
    # collects hardware evidence is imported by its kind's name, of which a run has one or two: all of it counts.
    Tier(
        held="a run's other keys (agent)",
        roots=(
            "glasshouse.runtime.__main__",
            *(f"glasshouse.runtime.roots.{path.stem}" for path in sorted(_COLLECTORS.glob("*.py"))),
        ),
        ceiling=11906,
    ),
    # A tenth is for lines: what a script saves is gathered here, and laid out again.
    Tier(
        held="plaintext and asset keys (worker)",
        roots=(
            "glasshouse.workloads.worker.__main__",
            "glasshouse.workloads.builtin.script",  # by its name alone, as the other workloads
            "glasshouse.collectives.torch_backend.entry",
        ),
        ceiling=11930,
    ),
)


def main() -> int:
    counted = [(tier, sum(code_lines(_file(name)) for name in closure(tier.roots))) for tier in TIERS]
    for tier, lines in counted:
        print(f"{lines:>7,}  {tier.held}")
    grown = [(tier, lines) for tier, lines in counted if lines > tier.ceiling]
    if "--check" in sys.argv[1:]:
        for tier, lines in grown:
            print(f"{tier.held}: {lines:,} lines of code, and the ceiling is {tier.ceiling:,} (benchmarks/trusted.py)")
        return bool(grown)
    return 0


def closure(roots: Iterable[str]) -> set[str]:
    """Return the modules of Glasshouse that these can import, themselves and their packages among them."""
    found: set[str] = set()
    waiting = set(roots)
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        names = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)} - found
        found |= names
        waiting |= {one for each in names for one in _imported(each)} - found
    return found


def code_lines(path: Path) -> int:
    """Return how many lines of a source file hold code."""
    text = path.read_text()
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _LAYOUT
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines -= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def _imported(name: str) -> Iterator[str]:
    """Yield what a module imports of Glasshouse, wherever it does so, but not what type checkers alone see."""
    waiting: list[ast.AST] = [ast.parse(_file(name).read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("glasshouse."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "glasshouse":
            yield str(node.module)
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (member for member in members if _exists(member))


def _file(name: str) -> Path:
    path = SOURCES.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _exists(name: str) -> bool:
    return _file(name).is_file()


if __name__ == "__main__":
    sys.exit(main())
