"""What departs from a provider's description of its interface is found, in requests and in answers."""

from __future__ import annotations

from typing import Any

import pytest

from simulators.api_description import Description

POD = {
    "type": "object",
    "required": ["id", "cost"],
    "properties": {"id": {"type": "string"}, "cost": {"type": ["number", "null"]}, "at": {"format": "date-time"}},
}
ANSWER = {"application/json": {"schema": {"$ref": "#/components/schemas/Pod"}}}
DESCRIPTION = Description(
    {
        "openapi": "3.1.0",
        "paths": {
            "/pods/{id}": {
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"maxLength": 4}}],
                "get": {
                    "parameters": [{"$ref": "#/components/parameters/Tail"}],
                    "responses": {"200": {"content": ANSWER}, "4XX": {"description": "no body"}},
                },
                "put": {
                    "requestBody": {"required": True, "content": ANSWER},
                    "responses": {"204": {"description": "done"}},
                },
            },
            "/pods/all": {
                "get": {
                    "parameters": [
                        {
                            "name": "kinds",
                            "in": "query",
                            "required": True,
                            "explode": False,
                            "schema": {"type": "array", "items": {"enum": ["A", "B"]}},
                        }
                    ],
                    "responses": {"default": {"content": ANSWER}},
                }
            },
        },
        "components": {
            "schemas": {"Pod": POD},
            "parameters": {"Tail": {"name": "tail", "in": "query", "schema": {"type": "integer", "maximum": 9}}},
        },
    }
)


@pytest.mark.parametrize(
    ("method", "target", "body", "fault"),
    [
        ("GET", "/pods/7", None, None),
        ("GET", "/pods/7?tail=9", None, None),
        ("GET", "/pods/7?tail=10", None, "tail: $ 10 is greater than the maximum of 9"),
        ("GET", "/pods/7?tail=x", None, "tail: $ 'x' is not of type 'integer'"),
        ("GET", "/pods/7?tail=1&tail=2", None, "the parameter tail is there more than once"),
        ("GET", "/pods/7?head=1", None, "the parameter head is not described"),
        ("GET", "/pods/77777", None, "id: $ '77777' is too long"),
        ("GET", "/pods/7", {}, "a body is not described"),
        ("GET", "/nodes", None, "GET /nodes is not described"),
        ("POST", "/pods/7", None, "POST /pods/7 is not described"),
        ("GET", "/pods/all?kinds=A,B", None, None),
        ("GET", "/pods/all?kinds=A,C", None, "kinds: $[1] 'C' is not one of ['A', 'B']"),
        ("GET", "/pods/all", None, "the parameter kinds is missing"),
        ("PUT", "/pods/7", {"id": "7", "cost": None}, None),
        ("PUT", "/pods/7", None, "the body is missing"),
        ("PUT", "/pods/7", {"id": 7, "cost": 1}, "body: $.id 7 is not of type 'string'"),
    ],
)
def test_a_request_is_held_to_its_description(method: str, target: str, body: Any, fault: str | None) -> None:
    assert DESCRIPTION.request_faults(method, target, body) == ([] if fault is None else [fault])


@pytest.mark.parametrize(
    ("status", "kind", "body", "fault"),
    [
        (200, "application/json; charset=utf-8", {"id": "7", "cost": 0.5, "more": 1}, None),
        (200, "application/json", {"id": "7"}, "body: $ 'cost' is a required property"),
        (200, "application/json", {"id": "7", "cost": 1, "at": "noon"}, "body: $.at 'noon' is not a 'date-time'"),
        (200, "text/html", "<p>", "a body of text/html is not described"),
        (404, "", None, None),
        (404, "application/json", {}, "a body is not described"),
        (500, "", None, "HTTP 500 is not described"),
    ],
)
def test_an_answer_is_held_to_its_description(status: int, kind: str, body: Any, fault: str | None) -> None:
    assert DESCRIPTION.response_faults("GET", "/pods/7", status, kind, body) == ([] if fault is None else [fault])


def test_an_answer_without_a_status_of_its_own_is_held_to_the_default() -> None:
    assert DESCRIPTION.response_faults("GET", "/pods/all", 503, "application/json", {"id": "7"}) != []
