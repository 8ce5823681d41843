"""What providers with a JSON interface and accounts share, and how an answer's values are read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.providers.rental.account_api import Api
from glasshouse.providers.rental.provider import Offer, Options, Provider

OUTPUT_BYTES = 64 << 10


class RestProvider(Provider):
    """An account at a provider, by its key and where its interface is (None: the usual one); base of its `Provider`."""

    title: str  # in sentences
    usual_url: str
    settles_s = 180.0  # chosen, not measured: none promises anything
    user = "root"
    has_sshd = True

    def __init__(self, key: str, url: str | None = None) -> None:
        self._url = (url or self.usual_url).rstrip("/")
        self.api = Api(self.title, self._url, key)

    def account(self, salt: str) -> str:
        return self.api.account(salt)


def cheapest(offers: Iterable[Offer], options: Options) -> list[Offer]:
    """Return the offers that cost no more than they may, the cheapest first."""
    fitting = [offer for offer in offers if offer.usd_per_hour <= options.most_per_hour_usd]
    return sorted(fitting, key=lambda offer: (offer.usd_per_hour, offer.id))


def no_offer(why: str) -> PlatformError:
    """Return the error of an offer that is gone."""
    return PlatformError(Code.NO_OFFER, f"the machine cannot be rented any more: {why}", hint="take another offer")


def unexpected(provider: str, what: str) -> PeerError:
    """Return the error of an answer that is not as the provider describes it."""
    hint = "if its interface has changed, a newer glasshouse may have the new one"
    return PeerError(Code.PROVIDER_PROTOCOL, f"{provider} answered {what}", hint=hint)


def unknown(provider: str, what: str, text: str, known: Iterable[str]) -> UsageError:
    """Return the error of a name that a provider does not have, with the nearest of those that it has."""
    lower = {name.lower(): name for name in known if name}
    near = difflib.get_close_matches(text.lower(), lower, n=3, cutoff=0.0)
    hint = f"the nearest are {', '.join(lower[name] for name in near)}" if near else "there is none at all now"
    return UsageError(Code.USAGE, f"{provider} has no {what} called {text!r}", hint=hint)


def words(text: str) -> list[str]:
    """Return the words of a name, in lower case."""
    return re.findall(r"[a-z0-9]+", text.lower())


def number(value: Any) -> Decimal | None:
    """Return an answer's number; None for what is none, or could not be one of money, memory or time."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or not 0 <= value < 10**12:
        return None
    return Decimal(value)


def shown(text: Any) -> str:
    """Return an answer's text for people: short and printable; empty for what is none."""
    short = " ".join(text.split())[:200] if isinstance(text, str) else ""
    return short if short.isprintable() else ascii(short)
