"""``python -m glasshouse.broker``: one broker process; prints one JSON line when it is ready."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from glasshouse.broker.api.owner_calls import BrokerReady
from glasshouse.broker.http.serving import serve
from glasshouse.errors import GlasshouseError


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; return the exit status."""
    parser = argparse.ArgumentParser(prog="glasshouse-broker", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory of database and key file (mode 0700)")
    parser.add_argument("--runtime-bind", default="127.0.0.1:0", help="host:port or unix:/path, for runtimes")
    parser.add_argument("--owner-socket", type=Path, required=True, help="path of the owner's Unix socket")
    parser.add_argument("--stop-at-eof", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(arguments)
    try:
        serve(
            data_dir=options.data,
            runtime_bind=options.runtime_bind,
            owner_socket=options.owner_socket,
            ready=_print_ready,
            stop_at_eof=sys.stdin.fileno() if options.stop_at_eof else None,
        )
    except GlasshouseError as error:
        sys.stderr.write(f"{error}\n{error.hint}\n" if error.hint else f"{error}\n")
        return error.exit_code
    return 0


def _print_ready(ready: BrokerReady) -> None:
    sys.stdout.write(ready.encode().decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
