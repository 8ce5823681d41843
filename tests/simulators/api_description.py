"""What a provider publishes of its interface, and where an exchange departs from it: OpenAPI 3.1.

The descriptions are no part of this repository: GLASSHOUSE_TEST_DATA names the folder that has them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

__all__ = ["Description", "described", "needs_description"]

_HOME = "urn:description"


def _path(name: str) -> Path:
    return Path(os.environ.get("GLASSHOUSE_TEST_DATA", "/nonexistent")) / "providers" / name


def needs_description(name: str) -> pytest.MarkDecorator:
    """Skip a test where a description is not at hand."""
    reason = f"this machine does not have {name} (GLASSHOUSE_TEST_DATA)"
    return pytest.mark.skipif(not _path(name).is_file(), reason=reason)


def described(name: str) -> Description:
    """Return a description that `needs_description` found."""
    text = _path(name).read_text(encoding="utf-8")
    return Description(json.loads(text) if name.endswith(".json") else yaml.safe_load(text))


class Description:
    """A description of an interface.

    Args:
        document: as published.
        folder: what stands before every path of its server.
    """

    def __init__(self, document: dict[str, Any], folder: str = "") -> None:
        self.document: dict[str, Any] = document
        self._folder = folder
        resource = Resource.from_contents(self.document, default_specification=DRAFT202012)
        self._registry: Registry[Any] = Registry().with_resource(_HOME, resource)
        self._templates = {
            path: re.compile(re.sub(r"\\\{[^}]+\\\}", "[^/]+", re.escape(path))) for path in self.document["paths"]
        }

    def template(self, path: str) -> str | None:
        """Return the path of the description that a path is of: the one with the fewest parameters."""
        bare = path.removeprefix(self._folder)
        found = [template for template, pattern in self._templates.items() if pattern.fullmatch(bare)]
        return min(found, key=lambda template: template.count("{"), default=None)

    def request_faults(self, method: str, target: str, body: Any = None) -> list[str]:
        """Return where a request is not as described.

        Args:
            method: of HTTP, in capitals.
            target: path and query.
            body: its JSON; None for none.
        """
        parts = urlsplit(target)
        operation, template = self._operation(method, parts.path), self.template(parts.path)
        if operation is None or template is None:
            return [f"{method} {parts.path} is not described"]
        shared = self.document["paths"][template].get("parameters", [])
        parameters = [self._resolved(each) for each in [*shared, *operation.get("parameters", [])]]
        faults = list(self._query_faults(parameters, parts.query))
        faults += self._path_faults(parameters, template, parts.path.removeprefix(self._folder))
        content = operation.get("requestBody")
        if content is None:
            return faults if body is None else [*faults, "a body is not described"]
        content = self._resolved(content)
        if body is None:
            return [*faults, "the body is missing"] if content.get("required") else faults
        return faults + self._faults(content["content"]["application/json"].get("schema", {}), body, "body")

    def response_faults(self, method: str, target: str, status: int, kind: str, body: Any) -> list[str]:
        """Return where an answer is not as described.

        Args:
            method, target: of the request.
            status: of HTTP.
            kind: its Content-Type, empty for none.
            body: its JSON, or its text where it has none.
        """
        operation = self._operation(method, urlsplit(target).path)
        if operation is None:
            return [] if status in (404, 405) else [f"{method} {target} is not described"]
        answers = operation["responses"]
        names = (str(status), f"{status // 100}XX", "default")
        found = next((answers[name] for name in names if name in answers), None)
        if found is None:
            return [f"HTTP {status} is not described"]
        content = self._resolved(found).get("content")
        if not content:
            return [] if body in (None, "") else ["a body is not described"]
        bare = kind.partition(";")[0].strip()
        if bare not in content:
            return [f"a body of {bare or 'no kind'} is not described"]
        return self._faults(content[bare].get("schema", {}), body, "body")

    def _operation(self, method: str, path: str) -> dict[str, Any] | None:
        template = self.template(path)
        return None if template is None else self.document["paths"][template].get(method.lower())

    def _query_faults(self, parameters: Sequence[Mapping[str, Any]], query: str) -> Iterable[str]:
        given = parse_qs(query, keep_blank_values=True)
        known = {each["name"]: each for each in parameters if each["in"] == "query"}
        for name in sorted(given.keys() - known.keys()):
            yield f"the parameter {name} is not described"
        for name, parameter in known.items():
            if name not in given:
                if parameter.get("required"):
                    yield f"the parameter {name} is missing"
                continue
            schema = self._resolved(parameter.get("schema", {}))
            values = given[name]
            if schema.get("type") == "array" and parameter.get("explode") is False:
                values = values[-1].split(",")
            elif schema.get("type") != "array" and len(values) > 1:
                yield f"the parameter {name} is there more than once"
            inner = self._resolved(schema.get("items", {})) if schema.get("type") == "array" else schema
            typed = [_typed(inner, value) for value in values]
            yield from self._faults(parameter["schema"], typed if schema.get("type") == "array" else typed[-1], name)

    def _path_faults(self, parameters: Sequence[Mapping[str, Any]], template: str, path: str) -> list[str]:
        names = re.findall(r"\{([^}]+)\}", template)
        match = re.fullmatch(re.sub(r"\\\{[^}]+\\\}", "([^/]+)", re.escape(template)), path)
        assert match is not None
        faults = []
        for name, value in zip(names, match.groups(), strict=True):
            for parameter in parameters:
                if parameter["in"] == "path" and parameter["name"] == name:
                    schema = self._resolved(parameter["schema"])
                    faults += self._faults(parameter["schema"], _typed(schema, unquote(value)), name)
        return faults

    def _resolved(self, value: Mapping[str, Any]) -> Any:
        while "$ref" in value:
            node: Any = self.document
            for part in str(value["$ref"]).removeprefix("#/").split("/"):
                node = node[part.replace("~1", "/").replace("~0", "~")]
            value = node
        return value

    def _faults(self, schema: Mapping[str, Any], value: Any, what: str) -> list[str]:
        anchored = _anchored(schema)
        checker = jsonschema.Draft202012Validator(
            anchored, registry=self._registry, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        return [f"{what}: {error.json_path} {error.message[:200]}" for error in checker.iter_errors(value)]


def _typed(schema: Mapping[str, Any], text: str) -> Any:
    """Return what a parameter's text stands for, by the type that is described; itself where it cannot."""
    kinds = schema.get("type")
    for kind in [kinds] if isinstance(kinds, str) else kinds or []:
        try:
            if kind == "integer":
                return int(text)
            if kind == "number":
                return float(text)
        except ValueError:
            continue
        if kind == "boolean" and text in ("true", "false"):
            return text == "true"
    return text


def _anchored(value: Any) -> Any:
    """Return a schema whose references say which document they are of."""
    if isinstance(value, dict):
        return {
            key: f"{_HOME}{inner}" if key == "$ref" and str(inner).startswith("#") else _anchored(inner)
            for key, inner in value.items()
        }
    return [_anchored(inner) for inner in value] if isinstance(value, list) else value
