"""A job file's JSON Schema, from the declarations that validate it.

Laws: what the validator takes, the schema takes; the other way round but for what no schema can express, which is
`BEYOND`.
Source: JSON Schema draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.jobs.define import jobfile
from glasshouse.wire.policy import SCRIPT
from glasshouse.workloads.job_keys import REQUIRED, Field, Rule, declared
from glasshouse.workloads.registry import MODULES, load

BEYOND = (
    "the longest time of a duration",
    "the least and the largest of a number that is written as a text",
    "a whole number written as 5.0, which in JSON is 5",
    "levels and networks that this version cannot prove",
    "folders of outputs of which one lies in another",
    "what is in the files that are named",
)
"""What the validator refuses and the schema does not."""


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
