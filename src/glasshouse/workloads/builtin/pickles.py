"""Finds the calls in a script that write pickles, so that a job can be mended before it is paid for.

Sources are parsed, never run. A hint is no verdict: what a run refuses is what it finds in its output folder.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping

__all__ = ["parsed_source", "pickle_hints"]

# What each call leaves behind, by its full name.
_WRITERS = {
    "cloudpickle.dump": "a pickle",
    "dill.dump": "a pickle",
    "joblib.dump": "a pickle",
    "pickle.Pickler": "a pickle",
    "pickle.dump": "a pickle",
    "torch.save": "a pickle",
    "lightning.Trainer": "checkpoints that are pickles",
    "pytorch_lightning.Trainer": "checkpoints that are pickles",
    "transformers.Seq2SeqTrainer": "training_args.bin and optimizer.pt, which are pickles",
    "transformers.Trainer": "training_args.bin and optimizer.pt, which are pickles",
    "trl.SFTTrainer": "training_args.bin and optimizer.pt, which are pickles",
}
_METHODS = {"to_pickle": "a pickle"}  # of a data frame, whatever its name


def pickle_hints(files: Mapping[str, bytes | str]) -> list[str]:
    """Return one line for each place in a job's Python files that seems to write a pickle.

    Args:
        files: contents by name; only names that end in ``.py`` are looked at, and one that does not parse is passed
            over.

    Returns:
        Lines such as ``train.py line 41: torch.save writes a pickle``, by file and line; none where the job's params
        say ``allow_pickle = true`` is the caller's affair.
    """
    return [hint for name in sorted(files) if name.endswith(".py") for hint in _hints(name, files[name])]


def parsed_source(source: bytes | str) -> ast.Module | None:
    """Return the tree of a Python file; None for one that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in the script
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _hints(name: str, source: bytes | str) -> list[str]:
    tree = parsed_source(source)
    if tree is None:
        return []
    known = _imported(tree)
    found = sorted((call.lineno, *written) for call in _calls(tree) if (written := _written(call, known)))
    return [f"{name} line {line}: {called} writes {what}" for line, called, what in dict.fromkeys(found)]


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for: ``{"np": "numpy", "save": "torch.save"}``."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def _written(call: ast.Call, known: Mapping[str, str]) -> tuple[str, str] | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
        return call.func.attr, _METHODS[call.func.attr]
    parts: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    full = ".".join([known[node.id], *reversed(parts)])
    return (full, _WRITERS[full]) if full in _WRITERS else None
