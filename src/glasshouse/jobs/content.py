"""What goes into a package: a job's files and its parameters, the same for the sealed and the raw leg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.hub import is_hub_id, pack_model
from glasshouse.jobs.inputs import gather
from glasshouse.jobs.jobfile import Job
from glasshouse.package.write import Source
from glasshouse.wire.canonical import Json
from glasshouse.workloads.params import LoraParams, MlpParams, ScriptParams
from glasshouse.workloads.params import parse as parse_params
from glasshouse.workloads.pickles import pickle_hints

__all__ = ["Content", "content_of", "pickle_warnings"]

_MAX_SOURCE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Files and parameters.

    Attributes:
        sources: in the order of their names.
        params: the workload's, as they travel in the sealed index.
    """

    sources: Sequence[Source]
    params: Mapping[str, Json]


def content_of(job: Job) -> Content:
    """List a job's files, fetch its model if that comes from the hub, and check that parameters name inputs.

    Raises:
        UsageError: as `inputs.gather` and `hub.pack_model`; `job-invalid` for a parameter that names an input which
            the package will not have: found here, not on a rented machine.
    """
    sources, params = gather(job.folder, job.inputs, follow_links=job.follow_links), dict(job.params)
    if is_hub_id(job.workload, params):
        weights, params = pack_model(params)
        taken = {source.path for source in sources} & {source.path for source in weights}
        if taken:
            raise UsageError(Code.JOB_INVALID, f"the input {min(taken)!r} has the name of a file of the model")
        sources = sorted([*sources, *weights], key=lambda source: source.path.encode())
    _check_named(job.workload, params, [source.path for source in sources])
    return Content(sources=sources, params=params)


def pickle_warnings(job: Job) -> list[str]:
    """Return one line for each place in a script job that seems to write a pickle, which a run would refuse.

    Raises:
        UsageError: as `inputs.gather`, or `source-changed`.
    """
    parsed = parse_params(job.workload, job.params)
    if not isinstance(parsed, ScriptParams) or parsed.allow_pickle:
        return []
    files: dict[str, bytes] = {}
    for source in gather(job.folder, job.inputs, follow_links=job.follow_links):
        if source.path.endswith(".py") and source.bytes <= _MAX_SOURCE_BYTES:
            with source.open() as stream:
                files[source.path] = stream.read(_MAX_SOURCE_BYTES)
    return pickle_hints(files)


def _check_named(workload: str, params: Mapping[str, Json], names: list[str]) -> None:
    parsed = parse_params(workload, params)
    wanted: list[tuple[str, str]] = []
    match parsed:
        case ScriptParams(script=script):
            wanted.append(("script", script))
        case MlpParams(data=str(data)) | LoraParams(data=data):
            wanted.append(("data", data))
    if isinstance(parsed, LoraParams) and parsed.model.startswith("inputs:"):
        folder = parsed.model.removeprefix("inputs:").rstrip("/")
        if not any(name.startswith(f"{folder}/") for name in names):
            raise UsageError(
                Code.JOB_INVALID, f"params.model names the folder {folder!r}, which is not among the [inputs]"
            )
    for key, name in wanted:
        if name not in names:
            raise UsageError(
                Code.JOB_INVALID,
                f"params.{key} = {name!r} is not among the [inputs]: {', '.join(names[:5])}"
                + (" ..." if len(names) > 5 else ""),
            )
