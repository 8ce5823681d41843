"""`glasshouse schema`: the JSON Schema of a job file, for editors."""

from __future__ import annotations

import json
import sys

from glasshouse.cli.options import Json

__all__ = ["command"]


def command(as_json: Json = False) -> None:
    from glasshouse.jobs.define.jobschema import schema

    sys.stdout.write(json.dumps(schema(), indent=None if as_json else 2) + "\n")
