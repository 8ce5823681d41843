"""A TPM's quote: signed, over exactly the registers that were asked for, and of the values beside it.

Source: TCG TPM 2.0 Library, Part 2, 10.12 and 10.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.tpm.boot_log import BootLog, replay
from glasshouse.attestation.roots.tpm.tpm_blob import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_structures import ALG_SHA256, Key, TpmReader, check_signature, refused
from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import sha256

_GENERATED, _QUOTE = 0xFF544347, 0x8018
_LOGGED = range(10)  # what the firmware and the boot loader write to


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """What a quote says; of a TPM whose key signed it."""

    extra_data: bytes
    values: Mapping[int, bytes]  # of the registers
    firmware: int  # version, as the TPM's maker numbers it
    resets: int  # of the TPM, since its owner's seed was made


def check_quote(
    quote: bytes, signature: bytes, *, key: Key, values: Sequence[bytes], registers: Sequence[int] = QUOTED_PCRS
) -> Quote:
    """Check a quote and return what it says.

    Args:
        quote: TPMS_ATTEST.
        signature: TPMT_SIGNATURE.
        values: of the bank sha256, as the evidence has them, one for each register.
        registers: sorted; no other may be selected.

    Raises:
        CheckFailedError: `hardware-signature` or `tpm-quote`.
    """
    check_signature(key, signature, quote)
    with refused(Code.TPM_QUOTE, "the quote"):
        reader = TpmReader(quote)
        if reader.number(4) != _GENERATED or reader.number(2) != _QUOTE:
            raise FormatError(Code.SCHEMA, "an attestation that is no quote, or that no TPM made")
        reader.sized()  # qualified name of the signer: follows from the key
        extra_data = reader.sized()
        reader.number(8)  # clock
        resets = reader.number(4)
        reader.take(4 + 1)  # restarts; whether the clock is safe
        firmware = reader.number(8)
        bits = sum(1 << register for register in registers)
        if reader.take(4 + 2 + 1 + 3) != b"\0\0\0\1" + ALG_SHA256.to_bytes(2, "big") + b"\3" + bits.to_bytes(
            3, "little"
        ):
            raise FormatError(Code.SCHEMA, "a selection of other registers, or of another bank than sha256")
        if reader.sized() != sha256(b"".join(values)) or len(values) != len(registers):
            raise FormatError(Code.SCHEMA, "a digest that is not of the values beside it")
        reader.end()
    return Quote(
        extra_data=extra_data, values=dict(zip(registers, values, strict=True)), firmware=firmware, resets=resets
    )


def check_values(values: Mapping[int, bytes], accepted: Mapping[str, Sequence[bytes]]) -> None:
    """Each register that the policy lists has a listed value; raises `CheckFailedError`, `reference-value-unknown`."""
    for register in sorted(map(int, accepted)):
        known = accepted[str(register)]
        if values[register] not in known:
            raise CheckFailedError(
                "12",
                Code.REFERENCE_VALUE,
                f"register {register} of the TPM has a value that the policy does not list",
                expected=", ".join(value.hex() for value in known),
                actual=f"{register}: {values[register].hex()}",
            )


def check_log(log: bytes, values: Mapping[int, bytes]) -> BootLog:
    """The firmware's log comes to the values of what firmware writes to; raises `CheckFailedError`, `tpm-log`."""
    with refused(Code.TPM_LOG, "the firmware's log"):
        found = replay(log)
    for register in _LOGGED:
        replayed = found.pcrs.get(register, bytes(32))
        if values[register] != replayed:
            raise CheckFailedError(
                "12",
                Code.TPM_LOG,
                f"the firmware's log does not come to the value of register {register}",
                expected=replayed.hex(),
                actual=values[register].hex(),
            )
    return found
