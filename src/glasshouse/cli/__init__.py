"""The command line: parse, call, print; one file per command.

Laws: only this room prints and exits. With `--json` exactly one object goes to standard output, also for an
error. Commands import what they need when they run: `glasshouse --help` loads no cryptography and nothing
here ever loads a training framework.
"""

from glasshouse.cli.app import main

__all__ = ["main"]
