"""Seals a job: the owner's files, and its model of the hub, under a fresh package key, the manifest under its owner's.

Law: a package never appears without its key. It is written under a temporary name, its key and record are stored, and
then it gets its final name; a failure before that leaves nothing, and one after it leaves the key with the package.
A model of the hub is downloaded here, because a worker has no network. Only weights as safetensors, configuration and
tokenizer are taken of it: no code and no pickle leaves the hub.
"""

from __future__ import annotations

import ast
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.define.input_files import Gathered, gather
from glasshouse.jobs.define.jobfile import Job
from glasshouse.jobs.define.package_records import KeyStore, PackageRecord, Sealed, public_part
from glasshouse.jobs.owner.home import Home, is_there, open_regular, write_private
from glasshouse.jobs.owner.installation import install_command
from glasshouse.jobs.owner.owner_identity import Identity, read_public
from glasshouse.package.manifest import Manifest
from glasshouse.package.write import Source, write
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import KEY_BYTES
from glasshouse.workloads.builtin.script import ScriptParams
from glasshouse.workloads.builtin.script_files import parsed_source, pickle_hints
from glasshouse.workloads.registry import examine
from glasshouse.workloads.registry import parse as parse_params

_MAX_SOURCE_BYTES = 1 << 20
_TEXTS = (".cfg", ".ini", ".json", ".py", ".sh", ".toml", ".yaml", ".yml")
_MENTIONS = (b"GLASSHOUSE_OUTPUTS", b"glasshouse.task", b"from glasshouse import task")
_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def seal(
    job: Job,
    *,
    out: Path,
    home: Home,
    identity: Identity,
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Sealed:
    """Seal a job into one file and keep its key; `progress` gets the plaintext bytes sealed so far, and in all.

    Raises:
        UsageError: `file-missing`, `job-invalid`, `model-not-found`, `source-changed`, `disk-full` or `usage`.
        PackageError: `package-path` or `package-limit` for what a package cannot hold.
    """
    began = time.monotonic()
    packed = content_of(job)
    # The owner first, then each backup once.
    recipients = tuple(dict.fromkeys([identity.public.sealing, *(read_public(path).sealing for path in job.backups)]))
    package_id, package_key = secrets.token_hex(16), secrets.token_bytes(KEY_BYTES)
    store, written = KeyStore(home.keys), list[Manifest]()
    record = PackageRecord(package_id=package_id, name=job.name, workload=job.workload, deployment=job.deployment)

    def content(stream: BinaryIO) -> None:
        sealed = write(
            stream,
            sources=packed.sources,
            job=dict(packed.params),
            workload=job.workload,
            floor=job.floor,
            owner=identity.signing,
            owner_sealing=identity.sealing.public,
            recipients=recipients,
            package_key=package_key,
            package_id=package_id,
            suite=job.suite,
            chunk_bytes=job.chunk_bytes,
            progress=progress,
        )
        written.append(sealed.manifest)
        store.put(
            package_key,
            package_id=package_id,
            manifest_sha256=sealed.manifest.sha256,
            recipients=recipients,
        )
        record.save(home)

    if is_there(out) and not replace:
        raise UsageError(Code.USAGE, f"{out} exists already", hint="--force replaces it")
    try:
        write_private(out, content, replace=replace)
    except BaseException:
        if not _stands(out, package_id):
            store.remove(package_id)
            record.remove(home)
        raise
    return Sealed(
        path=out,
        name=job.name,
        manifest=written[0],
        files=len(packed.sources),
        plain_bytes=sum(source.bytes for source in packed.sources),
        package_bytes=out.stat().st_size,
        seconds=time.monotonic() - began,
        left_out=tuple(packed.left_out),
        notes=tuple(packed.notes),
    )


def _stands(path: Path, package_id: str) -> bool:
    """Return whether this very package has its final name."""
    try:
        return public_part(path)[0].package_id == package_id
    except GlasshouseError:
        return False


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


def is_hub_id(workload: str, params: Mapping[str, Json]) -> bool:
    """Return whether a job's model comes from the hub."""
    return workload == "lora" and not str(params["model"]).startswith(("config:", "inputs:"))


def pack_model(params: Mapping[str, Json]) -> tuple[list[Source], dict[str, Json]]:
    """Download a `lora` job's model; return its files as inputs, and the parameters that name them.

    Raises:
        UsageError: `model-not-found`: unknown, private or unreachable; `requirement-missing` without the hub's client.
    """
    name, revision = str(params["model"]), params.get("revision")
    snapshot = _download(name, None if revision is None else str(revision))
    folder = f"models/{PurePosixPath(name).name}"
    sources = []
    for path in sorted(filter(Path.is_file, snapshot.rglob("*"))):
        real = path.resolve(strict=True)  # the hub's cache consists of links into its store
        name_here = f"{folder}/{path.relative_to(snapshot).as_posix()}"
        sources.append(Source(path=name_here, bytes=real.stat().st_size, open=partial(open_regular, real)))
    if not any(source.path.endswith(".safetensors") for source in sources):
        raise UsageError(Code.MODEL_NOT_FOUND, f"the model {name!r} has no weights in the form of safetensors")
    kept = {key: value for key, value in params.items() if key != "revision"}
    # The adapter is loaded later on a base from the hub, not from the package.
    return sources, {"base_name": name} | kept | {"model": f"inputs:{folder}"}


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            Code.REQUIREMENT_MISSING,
            f"the model {name!r} comes from the hub, and its client is not installed",
            hint=f'{install_command()}, or pack a local folder with model = "inputs:FOLDER"',
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_PATTERNS)))
    except Exception as error:  # the client lets errors of several HTTP libraries through
        at = name if revision is None else f"{name} at {revision}"
        raise UsageError(
            Code.MODEL_NOT_FOUND,
            f"the model {at!r} could not be had from the hub ({type(error).__name__}): "
            "it does not exist, is not public, or the hub cannot be reached",
            hint='check the id and the network, or pack a local folder with model = "inputs:FOLDER"',
        ) from None
