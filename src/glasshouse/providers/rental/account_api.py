"""Asks a provider's JSON interface over HTTPS, and asks again where that cannot do anything twice.

Laws: the account's key goes into the header of a request and nowhere else: no error, log or argument has it; what is
read has bounds; a request that creates something is sent once.
"""

from __future__ import annotations

import hmac
import http.client
import json
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.providers.rental.provider import UncertainError

_TIMEOUT_S = 30.0
_MAX_BYTES = 16 << 20
_LASTS = (False, False, False, False, True)  # five tries
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_WORDS_CHARS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiAnswer:
    """What came back."""

    status: int  # of HTTP
    value: Any  # the JSON in it, numbers with a point as `Decimal`; None where there is none
    text: str = ""  # the body of an answer that is no JSON


class _RefusedError(Exception):
    """An answer that asks for another try later, after some seconds where it names them."""

    def __init__(self, status: int, after_s: float | None) -> None:
        super().__init__("too many requests" if status == 429 else f"HTTP {status}")
        self.status, self.after_s = status, after_s


class Api:
    """One provider's interface, for one account.

    Args:
        url: ``https://host``; ``http://127.0.0.1:port`` in tests.

    Raises:
        UsageError: `usage` for a URL, `provider-key` for a key that cannot be one.
    """

    def __init__(self, name: str, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or not (parts.scheme == "https" or parts.hostname in ("127.0.0.1", "::1")):
            raise UsageError(Code.USAGE, f"{name} is asked over https, and {url} is not")
        if not re.fullmatch(r"[!-~]+", key):  # what refused it further down would print it
            why = f"the key for {name} is none: it is empty, or has other characters than a header may have"
            hint = "copy it again from the provider's page, without spaces or quotes around it"
            raise UsageError(Code.PROVIDER_KEY, why, hint=hint)
        self._name, self._parts, self._key = name, parts, key
        # Between tries it waits so long, and a part more that differs each time; tests have others.
        self.sleep: Callable[[float], None] = time.sleep
        self.jitter: Callable[[], float] = random.random

    def __repr__(self) -> str:
        return f"Api({self._name})"

    def account(self, salt: str) -> str:
        """Return what differs between keys and addresses, and does not show them."""
        return hmac.new(self._key.encode(), f"{salt} {self._parts.geturl()}".encode(), "sha256").hexdigest()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> ApiAnswer:
        """Ask for something; raises as `Provider`."""
        return self.ask("GET", path + ("?" + urlencode(query) if query else ""))

    def stream(self, path: str, query: Mapping[str, str], *, quiet_s: float, most_bytes: int) -> ApiAnswer:
        """Ask for what does not end, until it is quiet for so long or has come to so much; raises as `Provider`."""
        return self.ask("GET", path + "?" + urlencode(query), until=(quiet_s, most_bytes))

    def create(self, method: str, path: str, body: Mapping[str, Any], *, judged: bool = True) -> ApiAnswer:
        """Send a request that makes something, once; only what was certainly not taken is sent again.

        Args:
            judged: False for an interface whose refusals may name what they made all the same: the caller looks for
                that, and then calls `judge`.

        Raises:
            UncertainError: whether it was made is not known.
            PeerError, UsageError: as `Provider`; nothing was made.
        """
        for last in _LASTS:
            connection = self._connection()
            try:
                connection.connect()  # until then nothing was sent
            except OSError as error:
                if last:
                    raise self._away(type(error).__name__) from None
                self._pause(None, 1)
                continue
            try:
                answer = self._answer(*self._exchange(connection, method, path, body))
                if judged:
                    self.judge(answer)
                return answer
            except (OSError, http.client.HTTPException) as error:
                raise UncertainError(self._name, f"the connection ended ({type(error).__name__})") from None
            except _RefusedError as refused:
                if refused.status != 429:
                    raise UncertainError(self._name, str(refused)) from None
                if last:
                    raise self._away(str(refused)) from None
                self._pause(refused.after_s, 1)
            except PeerError as error:  # an answer that cannot be read is none
                raise UncertainError(self._name, error.message) from None
            finally:
                connection.close()
        raise AssertionError  # the last try returns or raises

    def file(self, url: str, max_bytes: int) -> str | None:
        """Return the first bytes of a file that an answer named, asked for without the account's key; None without one.

        Raises:
            PeerError: `provider-protocol`: it is not behind https.
        """
        try:
            parts = urlsplit(url)
            (parts.hostname or "").encode("idna")  # as a connection would, which raises where it is no name
            # Tests have both on the loopback, without TLS.
            behind = parts.scheme in ("https", self._parts.scheme) and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no URL, or no port or name
            behind = False
        if not behind:
            raise PeerError(Code.PROVIDER_PROTOCOL, f"{self._name} names a file that is not behind https")
        connection = self._connection(parts)
        try:
            connection.request("GET", (parts.path or "/") + ("?" + parts.query if parts.query else ""))
            response = connection.getresponse()
            content = response.read(max_bytes)
        except (OSError, UnicodeError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return content.decode(errors="replace") if response.status == 200 else None

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, until: tuple[float, int] | None = None
    ) -> ApiAnswer:
        """Send a request that changes nothing, or the same however often it comes; raises as `Provider`."""
        for number, last in enumerate(_LASTS):
            connection = self._connection()
            after_s = None
            try:
                answer = self._answer(*self._exchange(connection, method, path, body, until))
                self.judge(answer)
                return answer
            except ssl.SSLCertVerificationError:
                raise self._away("its certificate is not valid") from None
            except (OSError, http.client.HTTPException) as error:
                why = type(error).__name__
            except _RefusedError as refused:
                why, after_s = str(refused), refused.after_s
            finally:
                connection.close()
            if last:
                raise self._away(why)
            self._pause(after_s, number)
        raise AssertionError  # the last try returns or raises

    def _pause(self, asked_s: float | None, number: int) -> None:
        """Wait as long as was asked for, or longer from time to time; never all owners at once."""
        own_s = _FIRST_PAUSE_S * 2**number * (0.5 + self.jitter())
        self.sleep(min(_MOST_PAUSE_S, own_s if asked_s is None else asked_s + self.jitter()))

    def _connection(self, parts: SplitResult | None = None) -> http.client.HTTPConnection:
        parts = parts or self._parts
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        until: tuple[float, int] | None = None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        sent = None if body is None else json.dumps(body, default=str).encode()
        connection.request(method, self._parts.path.rstrip("/") + path, sent, headers)
        line = connection.sock
        response = connection.getresponse()
        if until is None or response.status != 200:
            return response, response.read(_MAX_BYTES + 1)
        return response, _until_quiet(line, response, *until)

    def _answer(self, response: http.client.HTTPResponse, content: bytes) -> ApiAnswer:
        """Return an answer that is one; raises `_RefusedError` for later."""
        status, kind = response.status, response.getheader("Content-Type") or ""
        if status == 429 or status >= 500:
            raise _RefusedError(status, _seconds(response.getheader("Retry-After")))
        if len(content) > _MAX_BYTES:
            raise PeerError(Code.PROVIDER_PROTOCOL, f"{self._name} answered with more than {_MAX_BYTES >> 20} MiB")
        text = content.decode(errors="replace")
        # Vast has JSON beneath other types too.
        if not content or not ("json" in kind or text.lstrip()[:1] in ("{", "[")):
            return ApiAnswer(status=status, value=None, text=text)
        try:
            return ApiAnswer(status=status, value=json.loads(text, parse_float=Decimal, parse_constant=_no_number))
        except (ValueError, ArithmeticError, RecursionError):  # a number may have an exponent of any length
            why = f"{self._name} answered HTTP {status} with what is no JSON"
            raise PeerError(Code.PROVIDER_PROTOCOL, why) from None

    def judge(self, answer: ApiAnswer) -> None:
        """Raise `UsageError` for an answer that refuses the account's key or its credit."""
        if answer.status in (401, 403):
            why = f"{self._name} refused the account's key (HTTP {answer.status}): {self.words(answer)}"
            hint = "make a key with the right to manage machines, and put it where docs/how-to says"
            raise UsageError(Code.PROVIDER_KEY, why, hint=hint)
        if answer.status == 402:
            why = f"{self._name} reports that the account has no money for it: {self.words(answer)}"
            hint = "add credit there, or lower what the job asks for"
            raise UsageError(Code.PROVIDER_MONEY, why, hint=hint)

    def words(self, answer: ApiAnswer) -> str:
        """Return the words of an answer for people, short and printable, without the account's key."""
        value = answer.value if isinstance(answer.value, dict) else {}
        found = next((value[name] for name in ("detail", "msg", "message", "error", "title") if value.get(name)), "")
        text = (found if isinstance(found, str) else json.dumps(found, default=str)) or answer.text
        text = " ".join(text.replace(self._key, "…").split())[:_WORDS_CHARS]
        return (text if text.isprintable() else ascii(text)) or f"HTTP {answer.status}"

    def _away(self, why: str) -> PeerError:
        hint = "look at its status page, and try again; nothing is lost by waiting"
        return PeerError(Code.PROVIDER_UNREACHABLE, f"{self._name} does not answer ({why})", hint=hint)


def _until_quiet(line: socket.socket, response: http.client.HTTPResponse, quiet_s: float, most_bytes: int) -> bytes:
    content, deadline = b"", time.monotonic() + _TIMEOUT_S
    line.settimeout(quiet_s)
    while len(content) < most_bytes and time.monotonic() < deadline:
        try:
            more = response.read1(most_bytes - len(content))
        except TimeoutError:
            break
        if not more:
            break
        content += more
    return content


def _seconds(text: str | None) -> float | None:
    """Return what `Retry-After` asks for, in seconds; a date, or what is none, is left to our own pauses."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else None


def _no_number(word: str) -> Any:
    raise ValueError(word)
