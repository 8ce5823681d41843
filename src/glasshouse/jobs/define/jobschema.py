"""A job file's JSON Schema, and a commented job file for each workload, from the declarations that validate it.

Laws: what the validator takes, the schema takes; the other way round but for what no schema can express, which is
`BEYOND`.
Source: JSON Schema draft 2020-12.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.jobs.define import jobfile
from glasshouse.jobs.define.jobfile import FIELDS
from glasshouse.wire.policy import SCRIPT
from glasshouse.workloads.job_keys import REQUIRED, Field, Rule, declared
from glasshouse.workloads.registry import MODULES, load

BEYOND = (
    "the shortest and the longest time of a duration",
    "the least and the largest of a number that is written as a text",
    "a whole number written as 5.0, which in JSON is 5",
    "levels and networks that this version cannot prove",
    "folders of outputs of which one lies in another",
    "what is in the files that are named",
)
"""What the validator refuses and the schema does not."""
_COMMENT_CHARS = 100
_POLICY = {"assurance": "software", "profile": "standard", "max_duration": "1h"}


def schema() -> dict[str, Any]:
    """Return the schema of a whole job file, as JSON."""
    whole = _table(jobfile.FIELDS)
    cases: list[dict[str, Any]] = []
    for kind in MODULES:
        params = load(kind).Params
        keys = declared(params)
        then: dict[str, Any] = {"properties": {"params": _table(keys, params.RULES)}}
        if any(field.default is REQUIRED for field in keys) or kind == SCRIPT:
            then["required"] = ["params"]
        if kind != SCRIPT:
            then["properties"]["env"] = {"maxProperties": 0}
        given = {"properties": {"workload": {"const": kind}}, "required": ["workload"]}
        cases.append({"if": given, "then": then})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of Glasshouse",
        **whole,
        "allOf": cases,
    }


def default_of(field: Field) -> Any:
    """Return a key's default as a job file would write it; None where it has none."""
    if field.default is REQUIRED or field.default is None:
        return None
    return field.kind.write(field.default)


def _table(fields: Sequence[Field], rules: Sequence[Rule] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _key(field) for field in fields},
        "additionalProperties": False,
    }
    if required := [field.name for field in fields if field.default is REQUIRED]:
        found["required"] = required
    if rules:
        found["allOf"] = [dict(rule.schema) for rule in rules]
    return found


def _key(field: Field) -> dict[str, Any]:
    schema = _table(field.kind.fields) if field.kind.fields else field.kind.schema
    found = {**schema, "description": field.meaning}
    default = default_of(field)
    return found if default is None or default == {} else found | {"default": default}


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A job to begin with."""

    job: str  # the job file
    files: Mapping[str, str]  # the inputs that it names, by their names beside it


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
            lines += [*_key_lines(field, chosen), ""]
    for field in FIELDS:
        if field.name in tables and not (field.name == "env" and workload != SCRIPT):
            lines += _table_lines(field, chosen, workload)
    return Template(job="\n".join(lines).rstrip("\n") + "\n", files=files)


def _table_lines(field: Field, chosen: Mapping[str, Any], workload: str) -> Iterator[str]:
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
            yield from _key_lines(key, given or {})
    yield ""


def _key_lines(field: Field, chosen: Mapping[str, Any]) -> Iterator[str]:
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
