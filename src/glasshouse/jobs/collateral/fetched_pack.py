"""Makes a collateral pack of what vendors publish now.

Laws: a pack is whole or is not made, so that the last one stays; what a vendor does not give is named, all of it at
once. Each item is what its name says, of this time and, as far as that can be checked here, of its maker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cryptography import x509

from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code, FormatError, PeerError, UsageError
from glasshouse.jobs.collateral.item_dates import Dates, dates_of
from glasshouse.jobs.collateral.item_makers import Makers
from glasshouse.jobs.collateral.nvidia_issuers import ISSUERS
from glasshouse.jobs.collateral.vendor_requests import Vendors
from glasshouse.jobs.collateral.vendor_services import OCSP, PRODUCTS, RIM, Certified, asked_about, request_for, signers
from glasshouse.jobs.owner.home import read_bounded

_INTEL = ("intel/pck-crl/platform", "intel/pck-crl/processor", "intel/qe-identity", "intel/root-crl")
# What a kind needs of every policy; the rest depends on the machine, and a policy or a refusal names it.
BY_KIND: Mapping[str, tuple[str, ...]] = {
    "azure": tuple(f"amd/crl/{product}" for product in PRODUCTS),
    "dstack": _INTEL,
    "nvidia": tuple(ISSUERS),
    "sev-snp": tuple(f"amd/crl/{product}" for product in PRODUCTS),
    "tdx": _INTEL,
}
_MAX_PEM_BYTES = 64 * 1024


def chain_in(path: Path) -> Certified:
    """Return those certificates of a device's chain that OCSP is asked about; raises `UsageError`.

    Args:
        path: a PEM file; first the certificate that the device made for itself, of which no service knows.
    """
    data = read_bounded(path, max_bytes=_MAX_PEM_BYTES, what="certificate file")
    try:
        found = asked_about(x509.load_pem_x509_certificates(data)[1:])
    except ValueError as error:
        raise UsageError(Code.USAGE, f"{path} has no certificates in PEM: {error}") from None
    if not found:
        raise UsageError(Code.USAGE, f"{path} is no chain of a device's: its certificate, its issuers', their root's")
    return found


def named_by(policy: HardwarePolicy) -> set[str]:
    """Return the names of the items that a policy needs, as far as they are known before any was fetched."""
    return {*policy.needed, *(BY_KIND["nvidia"] if "nvidia" in policy.kinds else ())}


def fetched_pack(
    names: Iterable[str],
    certified: Certified,
    *,
    last: Pack | None = None,
    now_us: int,
    got: Callable[[str, bytes, Dates], None],
    say: Callable[[str], None],
) -> Pack:
    """Fetch items, and OCSP responses about those who signed the manifests among them.

    Args:
        certified: certificates beside the known ones that OCSP may be asked about.
        last: its items are fetched again too; responses about certificates that are not known now stay until they end.
        now_us: the time that the items have to be of.
        got: is told of each item.
        say: is told of each wait.

    Raises:
        UsageError: a name that no vendor publishes; nothing was asked then.
        PeerError: `collateral-missing`: each item that did not come, with its URL and what to do.
    """
    certified = {**ISSUERS, **certified}
    old = {item.name: item.data for item in last.items} if last is not None else {}
    wanted = sorted({*names, *(name for name in old if name in certified or not name.startswith(OCSP))})
    for name in wanted:
        request_for(name, certified)
    found: dict[str, bytes] = {}
    failed: list[PeerError] = []
    asked = set[str]()
    vendors = Vendors(say)

    def fetch(name: str) -> None:
        if (without := name.removesuffix("/chain")) in asked:  # it comes with what it signed
            return
        asked.add(without)
        try:
            items = vendors.ask(request_for(name, certified))
            dates = {item: _current(item, data, now_us) for item, data in items.items()}
        except PeerError as error:
            failed.append(error)
            return
        found.update(items)
        for item, data in items.items():
            got(item, data, dates[item])

    for name in wanted:
        fetch(name)
    for name in [name for name in found if name.startswith(RIM)]:
        certified |= asked_about(signers(found[name]))
    for name in sorted(certified.keys() - ISSUERS.keys()):
        fetch(name)
    failed += _wrong(found, certified, now_us, say)
    if failed:
        said, hints = [error.message for error in failed], sorted({error.hint for error in failed})
        short = said[0] if len(said) == 1 else f"{len(said)} items did not come"
        raise PeerError(
            Code.COLLATERAL_MISSING,
            f"the pack was not made, and the last one stays: {short}",
            hint="\n  ".join((*(said if len(said) > 1 else ()), "; ".join(hints))),
        )
    for name, data in old.items():
        if name.startswith(OCSP) and name not in found and now_us < dates_of(name, data).expires_us:
            found[name] = data
    return Pack(items=tuple(Item(name=name, data=found[name]) for name in sorted(found)))


def _wrong(
    found: Mapping[str, bytes], certified: Certified, now_us: int, say: Callable[[str], None]
) -> list[PeerError]:
    """Return what is not its maker's; say what is revoked, which a gate has to be told, and what was not looked at."""
    makers = Makers(found, certified, now_us=now_us)
    if makers.unchecked:
        say("who signed what is of Intel and NVIDIA is left to the gate: pip install 'glasshouse-train[hardware]'")
    wrong = []
    for error in makers.wrong.values():
        why = error.message.removeprefix("check 12: ")
        if error.code is Code.HARDWARE_REVOKED:
            say(why)
        else:
            wrong.append(PeerError(error.code, why, hint="try again later, and look at this machine's clock"))
    return wrong


def _current(name: str, data: bytes, now_us: int) -> Dates:
    try:
        dates = dates_of(name, data)
    except FormatError as error:
        raise PeerError(Code.COLLATERAL_INVALID, error.message, hint="try again later") from None
    if dates.ages and not dates.issued_us <= now_us < dates.expires_us:
        why = f"{name} as its vendor gives it is not of this time"
        raise PeerError(Code.COLLATERAL_EXPIRED, why, hint="look at this machine's clock")
    return dates
