"""A job file's JSON Schema, from the declarations that validate it.

Laws: what the validator takes, the schema takes; the other way round but for what no schema can express, which is
`BEYOND`.
Source: JSON Schema draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.jobs.define import jobfile
from glasshouse.jobs.owner.durations import FORM, Duration, format_text
from glasshouse.workloads import fields as kinds
from glasshouse.workloads.fields import REQUIRED, Field, Kind, Rule
from glasshouse.workloads.params import TYPES, ScriptParams

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
    for kind, params in TYPES.items():
        then: dict[str, Any] = {"properties": {"params": _table(params.FIELDS, params.RULES)}}
        if any(field.default is REQUIRED for field in params.FIELDS) or kind == ScriptParams.KIND:
            then["required"] = ["params"]
        if kind != ScriptParams.KIND:
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
    if isinstance(field.kind, Duration):
        return format_text(field.default)
    return list(field.default) if isinstance(field.default, tuple) else field.default


def _table(fields: Sequence[Field], rules: Sequence[Rule] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _key(field) for field in fields},
        "additionalProperties": False,
    }
    if required := [field.name for field in fields if field.default is REQUIRED]:
        found["required"] = required
    if rules:
        found["allOf"] = [_rule(rule) for rule in rules]
    return found


def _key(field: Field) -> dict[str, Any]:
    found = _kind(field.kind) | {"description": field.meaning}
    default = default_of(field)
    return found if default is None or default == {} else found | {"default": default}


def _kind(kind: Kind) -> dict[str, Any]:
    match kind:
        case kinds.Text():
            return _text(kind)
        case kinds.Choice():
            return {"enum": list(kind.options)}
        case kinds.Integer():
            return {"type": "integer", "minimum": kind.low, "maximum": kind.high}
        case kinds.Number():
            number = {"type": "number", "minimum": kind.low, "maximum": kind.high}
            return {"anyOf": [number, {"type": "string", "pattern": _whole(kinds.DECIMAL)}]}
        case kinds.Flag():
            return {"type": "boolean"}
        case kinds.Texts():
            limits = {"minItems": kind.min_items, "maxItems": kind.max_items}
            return {"type": "array", "items": _text(kind.item), **limits} | (
                {"uniqueItems": True} if kind.distinct else {}
            )
        case kinds.Mapped():
            return {
                "type": "object",
                "propertyNames": _text(kind.key),
                "additionalProperties": _text(kind.value),
                "minProperties": kind.min_items,
                "maxProperties": kind.max_items,
            }
        case kinds.Table():
            return _table(kind.fields)
        case Duration():
            return {"type": "string", "pattern": _whole(FORM)}
        case jobfile.Anything():
            return {"type": "object"}
        case _:
            raise TypeError(f"a kind of value without a schema: {type(kind).__name__}")


def _text(kind: kinds.Text) -> dict[str, Any]:
    limits = {"minLength": kind.min_chars, "maxLength": kind.max_chars}
    return {"type": "string", **limits, "pattern": _whole(kind.form)}


def _whole(form: str) -> str:
    # In some dialects `$` also stands before a line break at the end.
    return rf"^(?:{form})$(?!\n)"


def _rule(rule: Rule) -> dict[str, Any]:
    match rule:
        case kinds.Needs():
            return {"dependentRequired": {rule.name: [rule.other]}}
        case kinds.ExactlyOne():
            return {"oneOf": [{"required": [rule.one]}, {"required": [rule.other]}]}
        case _:
            raise TypeError(f"a rule without a schema: {type(rule).__name__}")
