"""What a deployment demands of a machine of TDX: its images, and which states of the platform it excepts.

Source: spec/hardware-evidence.md, sections 4 and 7.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Record, choice, digest, integer, items, text

EXCEPTED = (
    "ConfigurationAndSWHardeningNeeded",
    "ConfigurationNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
    "SWHardeningNeeded",
)
"""The states of a platform that a policy may except; UpToDate needs no exception, and Revoked has none."""

_ADVISORY = re.compile(r"INTEL-SA-[0-9]{5}")
_FMSPC = re.compile(r"[0-9A-F]{12}")
_ZERO = bytes(48)
_COLLATERAL = (
    "intel/pck-crl/platform",
    "intel/pck-crl/processor",
    "intel/qe-identity",
    "intel/qe-identity/chain",
    "intel/root-crl",
)

Register: TypeAlias = Annotated[bytes, digest(48)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TdxImage(Record, name="policy.hardware.images"):
    """The registers of one image: what was loaded, and what that loaded."""

    mrtd: Register  # the firmware
    # The firmware's configuration, so that each shape of a machine has its own: processors, memory, devices.
    rtmr0: Annotated[tuple[bytes, ...], items(64, digest(48), min_items=1)]
    rtmr1: Register  # the kernel
    rtmr2: Register  # command line and initrd


@dataclass(frozen=True, kw_only=True, slots=True)
class TdxTerms(Record, name="policy.hardware"):
    """What is demanded of every quote of TDX."""

    advisories: Annotated[tuple[str, ...], items(64, text(32, _ADVISORY)), LEFT_OUT] = ()  # excepted by name
    # MRCONFIGID, MROWNER and MROWNERCONFIG, which the host chose.
    config_ids: Annotated[tuple[bytes, ...], items(64, digest(48)), LEFT_OUT] = (_ZERO,)
    # Families of processors, as the PCK's certificate has them: `intel/tcb/FMSPC` of each is in the pack.
    fmspcs: Annotated[tuple[str, ...], items(16, text(12, _FMSPC), min_items=1)]
    images: Annotated[tuple[TdxImage, ...], items(64, min_items=1)]
    owner: Annotated[bytes, digest(48), LEFT_OUT] = _ZERO
    owner_config: Annotated[bytes, digest(48), LEFT_OUT] = _ZERO
    statuses: Annotated[tuple[str, ...], items(len(EXCEPTED), choice(EXCEPTED)), LEFT_OUT] = ()
    tcb_evaluation: Annotated[int, integer(1, 2**31)]  # Intel's number of the oldest collateral that counts
    # Extended features, of which the values that are accepted; without them, those that Intel defined.
    xfam: Annotated[tuple[bytes, ...], items(16, digest(8)), LEFT_OUT] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The items of a collateral pack by which a quote is appraised, sorted."""
        infos = (f"intel/tcb/{fmspc}{behind}" for fmspc in self.fmspcs for behind in ("", "/chain"))
        return tuple(sorted({*_COLLATERAL, *infos}))


@dataclass(frozen=True, kw_only=True, slots=True)
class TdxPolicy(TdxTerms, name="policy.hardware.tdx"):
    """The object `tdx` of a policy: Glasshouse lies in the image, for what a runtime extends proves nothing."""

    chain: Annotated[str, choice(("image",)), LEFT_OUT] = ""

    def __post_init__(self) -> None:
        if not self.chain:
            raise FormatError(Code.CHAIN_MISSING, "policy.hardware.tdx names no chain: image")
