"""Packs a model of the hub: it is downloaded on the owner's side, because a worker has no network.

Only weights as safetensors, configuration and tokenizer are taken: no code and no pickle leaves the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import open_regular
from glasshouse.jobs.owner.installation import install_command
from glasshouse.package.write import Source
from glasshouse.wire.canonical import Json

_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


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
            hint=f'{install_command("train")}, or pack a local folder with model = "inputs:FOLDER"',
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
