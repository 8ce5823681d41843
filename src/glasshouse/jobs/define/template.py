"""A commented job file for each workload, with the least that it needs to run; written from the declarations."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.jobs.define.jobfile import FIELDS
from glasshouse.jobs.define.jobschema import default_of
from glasshouse.wire.policy import SCRIPT
from glasshouse.workloads.job_keys import Field, declared
from glasshouse.workloads.registry import load

_COMMENT_CHARS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A job to begin with."""

    job: str  # the job file
    files: Mapping[str, str]  # the inputs that it names, by their names beside it


_POLICY = {"assurance": "software", "profile": "standard", "max_duration": "1h"}


def template(workload: str) -> Template:
    """Return the job to begin with, for one of `wire.policy.WORKLOADS`."""
    example, files = load(workload).EXAMPLE
    chosen: dict[str, Any] = {
        "workload": workload,
        "inputs": {name: name for name in files},
        "params": example,
        "policy": _POLICY,
    }
    lines = [
        f"# A job for: glasshouse run {workload}.toml",
        "# Lines that are commented out show what holds without them; `glasshouse schema` has the same for editors.",
        "",
    ]
    # At the top level of TOML, keys come before tables.
    tables = {"inputs", "params", "env", *(field.name for field in FIELDS if field.kind.fields)}
    for field in FIELDS:
        if field.name not in tables:
            lines += [*_key(field, chosen), ""]
    for field in FIELDS:
        if field.name in tables and not (field.name == "env" and workload != SCRIPT):
            lines += _table(field, chosen, workload)
    return Template(job="\n".join(lines).rstrip("\n") + "\n", files=files)


def _table(field: Field, chosen: Mapping[str, Any], workload: str) -> Iterator[str]:
    given = chosen.get(field.name)
    yield from _wrapped(field.meaning)
    yield f"[{field.name}]" if given is not None else f"# [{field.name}]"
    if field.name == "inputs":
        yield from (f"{json.dumps(name)} = {json.dumps(path)}" for name, path in dict(given or {}).items())
    elif field.name == "env":
        yield '# WANDB_MODE = "offline"'
    else:
        inner: Sequence[Field] = field.kind.fields or declared(load(workload).Params)
        for key in inner:
            yield from _key(key, given or {})
    yield ""


def _key(field: Field, chosen: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrapped(field.meaning)
    if field.name in chosen:
        # The texts, numbers, truth values and lists of texts here are the same in TOML as in JSON.
        yield f"{field.name} = {json.dumps(chosen[field.name], ensure_ascii=False)}"
    elif (default := default_of(field)) is None:
        yield f"# {field.name} =   # {field.kind.allowed}"
    else:
        yield f"# {field.name} = {json.dumps(default, ensure_ascii=False)}"


def _wrapped(text: str) -> list[str]:
    width = _COMMENT_CHARS - len("# ")
    return ["# " + line for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)]
