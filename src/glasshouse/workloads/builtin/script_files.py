"""The checks of a script's files before a machine is rented: sources are parsed, never run."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Mapping, Sequence

from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.params import PlainFile

_MAX_SOURCE_BYTES = 4 << 20  # a parser's tree takes some forty times as much

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


def examine(
    script: str | None,
    module: str | None,
    requirements: Sequence[str],
    outputs: Sequence[str],
    files: Mapping[str, PlainFile],
) -> list[str]:
    """Check sources, requirements and output folders of a job; see `registry.examine`."""
    _check_outputs(outputs, files)
    notes = [note for requirement in requirements if (note := _requirement(requirement))]
    path = str(module).replace(".", "/")
    main = script or next((name for name in (f"{path}.py", f"{path}/__main__.py") if name in files), None)
    if main is None:
        notes.append(f"the module {module!r} is not among the [inputs]: the rented machine must have it")
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    for name in sorted(files):
        if not name.endswith(".py") and name != main:
            continue
        if files[name].bytes > _MAX_SOURCE_BYTES:
            notes.append(f"{name} is {files[name].bytes} bytes long and was not compiled here")
            continue
        try:
            _compile(name, files[name])
        except SyntaxError as error:
            where = f"{name} line {error.lineno or 1}: {error.msg}"
            if name == main:
                raise job_invalid(f"{where}; it is not valid {version}", hint="mend it, then seal again") from None
            notes.append(f"{where}; a run that imports it fails under {version}")
    return notes


def _check_outputs(outputs: Sequence[str], files: Mapping[str, PlainFile]) -> None:
    """Refuse inputs that would come back as outputs, or lie where a folder of outputs is made."""
    for folder in outputs:
        for name in files:
            if f"{name}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{name}/"):
                raise job_invalid(
                    f"the input {name!r} lies where the outputs of {folder!r} do",
                    hint='call it otherwise, or name other folders with outputs = ["…"] in [params]',
                )


def _compile(name: str, file: PlainFile) -> None:
    with file.open() as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd escapes in the script
        try:
            compile(stream.read(), name, "exec", dont_inherit=True)
        except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nesting that no parser bears
            raise SyntaxError(str(error) or type(error).__name__) from None


def _requirement(text: str) -> str:
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return f"the requirement {text!r} was not checked: the distribution 'packaging' is not installed here"
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise job_invalid(
            f"params.requirements: {text!r} is no requirement: {str(error).splitlines()[0]}",
            hint="write it as name, or name>=1.2,<2",
        ) from None
    return ""


def pickle_hints(files: Mapping[str, bytes | str]) -> list[str]:
    """Return lines such as ``train.py line 41: torch.save writes a pickle``, for Python files that parse.

    A hint is no verdict: a run refuses pickles by what is in its output folder.
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
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = sorted((call.lineno, *written) for call in calls if (written := _written(call, known)))
    return [f"{name} line {line}: {called} writes {what}" for line, called, what in dict.fromkeys(found)]


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
