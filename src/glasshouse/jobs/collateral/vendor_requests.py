"""Asks a vendor's service over HTTPS, without credentials, and asks again where it is away or has too many requests.

Laws: what is read has bounds, in bytes and in time; no redirect is followed; nothing of this owner's is sent.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.jobs.collateral.vendor_services import Request

MAX_ANSWER_BYTES = 1024 * 1024
_TIMEOUT_S = 20.0  # without a byte
_WHOLE_S = 60.0  # for an answer
_PAUSES_S = (1.0, 4.0, 15.0)  # AMD's service takes a request in some seconds from one address
_MOST_PAUSE_S = 60.0

sleep: Callable[[float], None] = time.sleep  # tests have another


class Vendors:
    """Asks one after the other; a host that was away once is asked for the rest without waiting for it again.

    Args:
        say: is told of each wait before another try.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._away: set[str] = set()

    def ask(self, request: Request) -> dict[str, bytes]:
        """Return the items that a request asks for.

        Raises:
            PeerError: `collateral-missing`: what happened, with the URL and what to do.
        """
        host = urlsplit(request.url).hostname or ""
        for pause_s in (*(() if host in self._away else _PAUSES_S), None):
            status, after_s, header, body = _exchange(request)
            if status == 200:
                try:
                    return request.items(header, body)
                except FormatError as error:
                    raise _failed(request, f"answered with {error.message}", "try again later") from None
            if status == 404:
                hint = f"compare {request.item.rpartition('/')[2]} with what the refusal or the machine shows"
                raise _failed(request, "does not know it", hint)
            why = body.decode(errors="replace") if status <= 0 else f"HTTP {status}"
            if pause_s is None or not (status in (0, 429) or status >= 500):
                break
            wait_s = min(_MOST_PAUSE_S, max(after_s, pause_s))
            self._say(f"{host} is asked for {request.item} again in {wait_s:.0f} s ({why})")
            sleep(wait_s)
        self._away.add(host)
        raise _failed(request, f"does not give it ({why})", "look whether it is reached from here, and try again")


def _failed(request: Request, why: str, hint: str) -> PeerError:
    host = urlsplit(request.url).hostname
    return PeerError(Code.COLLATERAL_MISSING, f"{request.item}: {host} {why}: {request.url}", hint=hint)


def _exchange(request: Request) -> tuple[int, float, str | None, bytes]:
    """Return status, seconds to wait, the header that was asked for, and the body or a reason.

    The status is 0 where none came, and -1 where it is of no use to ask again.
    """
    parts = urlsplit(request.url)
    deadline = time.monotonic() + _WHOLE_S
    connection = _connection(parts.scheme, parts.hostname or "", parts.port)
    try:
        headers = {"Content-Type": request.content_type} if request.body is not None else {}
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request("GET" if request.body is None else "POST", target, request.body, headers)
        response = connection.getresponse()
        body = b""
        while more := response.read1(64 * 1024):
            body += more
            if len(body) > MAX_ANSWER_BYTES:
                return 0, 0.0, None, f"more than {MAX_ANSWER_BYTES >> 20} MiB".encode()
            if time.monotonic() > deadline:
                return 0, 0.0, None, f"not whole in {_WHOLE_S:.0f} s".encode()
        if response.length:  # the connection ended before it
            return 0, 0.0, None, b"not whole"
        after = response.getheader("Retry-After") or ""
        after_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
        return response.status, after_s, response.getheader(request.chain) if request.chain else None, body
    except ssl.SSLCertVerificationError:
        return 0, 0.0, None, b"its certificate is not valid"
    except socket.gaierror:
        return -1, 0.0, None, b"its name is not found"
    except (OSError, http.client.HTTPException) as error:
        return 0, 0.0, None, type(error).__name__.encode()
    finally:
        connection.close()


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "http" and host == "127.0.0.1":  # of tests
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=ssl.create_default_context())
