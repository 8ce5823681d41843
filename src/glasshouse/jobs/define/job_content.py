"""What goes into a package: a job's files and its parameters, the same for the sealed and the raw leg."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.hub import is_hub_id, pack_model
from glasshouse.jobs.define.input_files import Gathered, gather
from glasshouse.jobs.define.jobfile import Job
from glasshouse.package.write import Source
from glasshouse.wire.canonical import Json
from glasshouse.workloads.builtin.script import ScriptParams
from glasshouse.workloads.builtin.script_files import parsed_source, pickle_hints
from glasshouse.workloads.registry import examine
from glasshouse.workloads.registry import parse as parse_params

_MAX_SOURCE_BYTES = 1 << 20
_TEXTS = (".cfg", ".ini", ".json", ".py", ".sh", ".toml", ".yaml", ".yml")
_MENTIONS = (b"GLASSHOUSE_OUTPUTS", b"glasshouse.task", b"from glasshouse import task")


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Files and parameters."""

    sources: Sequence[Source]  # in the order of their names
    params: Mapping[str, Json]  # the workload's, as they travel in the sealed index
    left_out: Sequence[str] = ()  # what of the inputs' folders is not packed, for people
    notes: Sequence[str] = ()  # what of the files could not be checked here, or will be passed over, for people


def content_of(job: Job) -> Content:
    """List a job's files, with its model of the hub, and check its parameters against them; raises `UsageError`."""
    gathered = _inputs(job)
    sources, params = gathered.sources, dict(job.params)
    if is_hub_id(job.workload, params):
        weights, params = pack_model(params)
        taken = {source.path for source in sources} & {source.path for source in weights}
        if taken:
            raise UsageError(Code.JOB_INVALID, f"the input {min(taken)!r} has the name of a file of the model")
        sources = sorted([*sources, *weights], key=lambda source: source.path.encode())
    files = {source.path: source for source in sources}
    notes = examine(job.workload, parse_params(job.workload, params), files)
    return Content(sources=sources, params=params, left_out=gathered.left_out, notes=notes)


def _inputs(job: Job) -> Gathered:
    return gather(job.folder, job.inputs, follow_links=job.follow_links, exclude=job.exclude)


def script_warnings(job: Job) -> list[str]:
    """Return a line for each thing in a script job that a run refuses or loses; raises `UsageError` as `gather`."""
    parsed = parse_params(job.workload, job.params)
    if not isinstance(parsed, ScriptParams):
        return []
    files: dict[str, bytes] = {}
    for source in _inputs(job).sources:
        if source.path.endswith(_TEXTS) and source.bytes <= _MAX_SOURCE_BYTES:
            with source.open() as stream:
                files[source.path] = stream.read(_MAX_SOURCE_BYTES)
    refused = "; a run refuses it as an output unless params.allow_pickle = true"
    lines = [] if parsed.allow_pickle else [line + refused for line in pickle_hints(files)]
    given = [text.encode() for text in (*parsed.arguments, *parsed.env.values())]
    texts = [text for name, source in files.items() for text in _texts(name, source)]
    mentions = (*(folder.encode() for folder in parsed.outputs), *_MENTIONS)
    if not any(word in text for text in (*texts, *given) for word in mentions):
        folders = ", ".join(f"{folder}/" for folder in parsed.outputs)
        lines.append(
            f"nothing in {parsed.what} or the files beside it mentions an output folder ({folders}): what is written "
            'elsewhere is lost; write there, or name other folders with outputs = ["…"] in [params]'
        )
    return lines


def _texts(name: str, source: bytes) -> list[bytes]:
    """Return what in a file may name a folder or a module: of Python, its texts and imports, and no variable's name."""
    tree = parsed_source(source) if name.endswith(".py") else None
    if tree is None:
        return [source]
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [text.encode(errors="replace") for text in found]
