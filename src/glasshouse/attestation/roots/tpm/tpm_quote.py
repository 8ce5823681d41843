"""A TPM's quote: signed, over exactly the registers that were asked for, and of the values beside it.

Source: TCG TPM 2.0 Library, Part 2, 10.12 and 10.13.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from glasshouse.attestation.refusal import CheckFailedError, check_same
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.attestation.roots.tpm.tpm_registers import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_structures import Key, check_signature, refused, sized
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import sha256

_HEAD = b"\xffTCG\x80\x18"  # TPM_GENERATED, TPM_ST_ATTEST_QUOTE
# Clock; resets; restarts, and whether the clock is safe; firmware's version; selection of one bank; digest.
_REST = struct.Struct(">8xI5xQ10s34s")
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
    bits = sum(1 << register for register in registers).to_bytes(3, "little")
    with refused(Code.TPM_QUOTE, "the quote"):
        if quote[: len(_HEAD)] != _HEAD:
            raise FormatError(Code.SCHEMA, "an attestation that is no quote, or that no TPM made")
        _, rest = sized(quote[len(_HEAD) :])  # qualified name of the signer: follows from the key
        quoted_data, rest = sized(rest)
        if len(rest) != _REST.size:
            raise FormatError(Code.SCHEMA, "a quote that is cut short, or bytes behind it")
        resets, firmware, selection, digest = _REST.unpack(rest)
        if selection != b"\0\0\0\1\0\x0b\3" + bits:
            raise FormatError(Code.SCHEMA, "a selection of other registers, or of another bank than sha256")
        if len(values) != len(registers) or digest != b"\0\x20" + sha256(b"".join(values)):
            raise FormatError(Code.SCHEMA, "a digest that is not of the values beside it")
    found = dict(zip(registers, values, strict=True))
    _check_values(found, accepted)
    claims: dict[str, Json] = {"firmware": f"{firmware:016x}", "resets": resets}
    if log:
        claims["log_events"] = _check_log(log, found)
    check_same("12", Code.HARDWARE_BINDING, "a quote that carries something else", extra_data.hex(), quoted_data.hex())
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
        expected, actual = replayed.get(register, bytes(32)), values.get(register, b"")
        what = f"a log of the firmware's that comes to another value of register {register}"
        check_same("12", Code.TPM_LOG, what, expected.hex(), actual.hex())
    return len(found.events)
