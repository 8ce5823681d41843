"""A TPM's quote: signed, over exactly the registers that were asked for, and of the values beside it.

Source: TCG TPM 2.0 Library, Part 2, 10.12 and 10.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.attestation.roots.tpm.tpm_registers import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_structures import ALG_SHA256, Key, TpmReader, check_signature, refused
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import sha256

_GENERATED, _QUOTE = 0xFF544347, 0x8018
_LOGGED = range(10)  # what the firmware and the boot loader write to


def appraise_quote(
    quote: bytes,
    signature: bytes,
    *,
    key: Key,
    values: Sequence[bytes],
    log: bytes,
    accepted: Mapping[str, Sequence[bytes]],
    extra_data: bytes,
    registers: Sequence[int] = QUOTED_PCRS,
) -> dict[str, Json]:
    """Make checks 4 to 8 of a quote; return what it says beside them.

    Args:
        quote: TPMS_ATTEST.
        signature: TPMT_SIGNATURE.
        values: of the bank sha256, as the evidence has them, one for each register.
        log: the firmware's, or empty.
        accepted: values by register, of a policy.
        extra_data: that the quote has to carry.
        registers: sorted; no other may be selected.

    Raises:
        CheckFailedError: `hardware-signature`, `tpm-quote`, `reference-value-unknown`, `tpm-log` or `hardware-binding`.
    """
    check_signature(key, signature, quote)
    with refused(Code.TPM_QUOTE, "the quote"):
        reader = TpmReader(quote)
        if reader.number(4) != _GENERATED or reader.number(2) != _QUOTE:
            raise FormatError(Code.SCHEMA, "an attestation that is no quote, or that no TPM made")
        reader.sized()  # qualified name of the signer: follows from the key
        quoted_data = reader.sized()
        reader.number(8)  # clock
        resets = reader.number(4)
        reader.take(4 + 1)  # restarts; whether the clock is safe
        firmware = reader.number(8)
        bits = sum(1 << register for register in registers).to_bytes(3, "little")
        if reader.take(10) != b"\0\0\0\1" + ALG_SHA256.to_bytes(2, "big") + b"\3" + bits:
            raise FormatError(Code.SCHEMA, "a selection of other registers, or of another bank than sha256")
        if len(values) != len(registers) or reader.sized() != sha256(b"".join(values)):
            raise FormatError(Code.SCHEMA, "a digest that is not of the values beside it")
        reader.end()
    found = dict(zip(registers, values, strict=True))
    _check_values(found, accepted)
    claims: dict[str, Json] = {"firmware": f"{firmware:016x}", "resets": resets}
    if log:
        claims["log_events"] = _check_log(log, found)
    if quoted_data != extra_data:
        raise CheckFailedError(
            "12",
            Code.HARDWARE_BINDING,
            "a quote of another run, challenge or key",
            expected=extra_data.hex(),
            actual=quoted_data.hex(),
        )
    return claims


def _check_values(values: Mapping[int, bytes], accepted: Mapping[str, Sequence[bytes]]) -> None:
    for register in sorted(map(int, accepted)):
        known = accepted[str(register)]
        actual = values.get(register)
        if actual not in known:
            raise CheckFailedError(
                "12",
                Code.REFERENCE_VALUE,
                f"register {register} of the TPM has a value that the policy does not list",
                expected=", ".join(value.hex() for value in known),
                actual="not quoted" if actual is None else actual.hex(),
            )


def _check_log(log: bytes, values: Mapping[int, bytes]) -> int:
    """Return how many events there are, which come to the values of what firmware writes to."""
    with refused(Code.TPM_LOG, "the firmware's log"):
        found = BootLog.read(log)
    replayed = found.replay()
    for register in _LOGGED:
        value = replayed.get(register, bytes(32))
        if values.get(register) != value:
            raise CheckFailedError(
                "12",
                Code.TPM_LOG,
                f"the firmware's log does not come to the value of register {register}",
                expected=value.hex(),
                actual=values.get(register, b"").hex(),
            )
    return len(found.events)
