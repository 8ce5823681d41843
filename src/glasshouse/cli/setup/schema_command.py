"""`glasshouse schema`: the JSON Schema of a job file, for editors."""

from __future__ import annotations

import json
import sys

from glasshouse.cli.options import JsonOptions
from glasshouse.jobs.define.jobschema import schema


def command(*, options: JsonOptions) -> None:
    """Print the schema; `--json` prints it on one line."""
    sys.stdout.write(json.dumps(schema(), indent=None if options.as_json else 2) + "\n")
