"""Output names for commands that do not ask for a passphrase: they are shown when no question is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasshouse.errors import GlasshouseError

if TYPE_CHECKING:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.wire.hpke import RecipientKey

__all__ = ["sealing_without_asking"]


def sealing_without_asking(home: Home) -> RecipientKey | None:
    """Return the owner's sealing key if it is here and not encrypted."""
    from glasshouse.jobs.owner.owner_identity import Identity, is_encrypted, read_private

    try:
        data = read_private(home.owner_private)
        return None if is_encrypted(data) else Identity.parse(data, None).sealing
    except GlasshouseError:
        return None
