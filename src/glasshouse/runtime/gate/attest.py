"""Challenge, evidence, release: asked for again, with the same keys, while answers are lost on the way.

Laws: a refusal is final, and so is an answer that fails its checks; only silence is tried again, with the same bytes,
and a challenge that was used already or is over, with a new one, for as long as the deadline allows. A machine of a
group asks again and again for what it was accepted with, for a while longer than the group's deadline can be away.
Nothing is opened here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from glasshouse.attestation.claims import Claims
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.errors import Code, PeerError, RefusedError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import Challenge, TpmKeys
from glasshouse.handshake.runtime_side import (
    CheckedRelease,
    challenge_request,
    check_release,
    evidence_message,
    read_challenge,
    release_request,
    with_blobs,
)
from glasshouse.package.manifest import Manifest
from glasshouse.runtime.gate.broker_client import BrokerClient, PendingError
from glasshouse.runtime.loop import Loop
from glasshouse.wire.crypto import SigningKey

DEADLINE_S = 60.0

# The evidence arrived and its answer was lost; or a reader on the way sent a copy before: the release went there, for
# no use. Or it was too late.
_USED_UP = frozenset({Code.NONCE_EXPIRED, Code.NONCE_REPLAYED, Code.NONCE_UNKNOWN})
_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
_ASK_EVERY_S = 1.0
# After the group's deadline, which is the end of one machine's challenge: for the broker to decide.
_SETTLED_S = 30.0


def now_us() -> int:
    """Return the time of this machine, in microseconds since the epoch."""
    return time.time_ns() // 1000


def attest(
    *,
    loop: Loop,
    gate: BrokerClient,
    launch: LaunchFile,
    manifest: Manifest,
    evidence_key: SigningKey,
    attester: Callable[[Challenge, int], tuple[Claims, Mapping[str, bytes]]],
    tpm: TpmKeys | None = None,
    sent: Callable[[bytes, tuple[bytes, ...]], None],
) -> tuple[bytes, CheckedRelease, float]:
    """Obtain a release; return the evidence that was accepted, the release for it, and from when its lease runs.

    The last is a time of the loop before which the gate had not released: an answer that was held back, or lost, does
    not extend the lease.

    Args:
        loop: goes on meanwhile: a debugger, a signal or the worker's end is noticed.
        evidence_key: signs the evidence, with the launch key.
        attester: makes the claims for a challenge at a time, and collects what hardware attests of them, by kind.
        tpm: the keys that the gate is to activate.
        sent: called with each evidence envelope and the blobs behind it, before they leave for the first time.

    Raises:
        PlatformError: `hardware-unavailable`: nothing could be collected.
        RefusedError: the gate refused, or the challenge was used up each time until the deadline.
        PeerError: `broker-unreachable` at the deadline; `broker-protocol`, `broker-untrusted` or
            `release-invalid` when its answer fails its checks, or when it never comes to an end of waiting.
    """
    give_up_s, wait_s = loop.now_s() + DEADLINE_S, _FIRST_RETRY_S
    asking, exchange, since_s = b"", None, loop.now_s()
    while True:
        try:
            if exchange is None:
                # Again the same request while none is answered, and below the same evidence: it is the same challenge
                # then, and a launch may have few that are open.
                asking = asking or challenge_request(launch, tpm)
                challenge = read_challenge(gate.post("/v1/challenge", asking), launch, now_us=now_us())
                asking = b""
                claims, blobs = attester(challenge, now_us())
                listed = [Blob.of(kind, blob) for kind, blob in blobs.items()]
                evidence = evidence_message(claims, listed, evidence_key=evidence_key, launch_key=launch.key())
                exchange = challenge, evidence, tuple(blobs.values())
                sent(*exchange[1:])
                since_s = loop.now_s()
            challenge, evidence, hardware = exchange
            answer, pending_s = _answer(loop, gate, launch, challenge, evidence, evidence_key, hardware)
            release = check_release(
                answer,
                launch,
                challenge,
                evidence=evidence,
                evidence_public=evidence_key.public,
                manifest_sha256=manifest.sha256,
                floor=manifest.floor,
                now_us=now_us(),
            )
            return evidence, release, max(since_s, pending_s)
        except (PeerError, RefusedError) as error:
            again = error.code is Code.BROKER_UNREACHABLE or error.code in _USED_UP
            if not again or loop.now_s() + wait_s > give_up_s:
                raise
            if error.code in _USED_UP:
                asking, exchange = b"", None
        loop.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_RETRY_S)


def _answer(
    loop: Loop,
    gate: BrokerClient,
    launch: LaunchFile,
    challenge: Challenge,
    evidence: bytes,
    evidence_key: SigningKey,
    hardware: tuple[bytes, ...] = (),
) -> tuple[bytes, float]:
    """Send the evidence and return the broker's answer; a machine of a group may have to wait for the others.

    Beside it, the time at which the last request was sent that it was told to wait upon; 0 for none.
    """
    asked_s = loop.now_s()
    try:
        return gate.post("/v1/evidence", with_blobs(evidence, hardware)), 0.0
    except PendingError:
        group = launch.claims().group
        if group is None or group.machines == 1:
            raise
    request = release_request(challenge, evidence, evidence_key=evidence_key)
    lifetime_s = (challenge.expires_us - challenge.issued_us) / 1e6  # its own clock: the broker's is not ours
    give_up_s, wait_s, pending_s = loop.now_s() + lifetime_s + _SETTLED_S, _FIRST_RETRY_S, asked_s
    while True:
        loop.sleep(wait_s)
        wait_s, asked_s = min(2 * wait_s, _ASK_EVERY_S), loop.now_s()
        try:
            return gate.post("/v1/release", request), pending_s
        except PendingError:
            pending_s = asked_s
            if loop.now_s() > give_up_s:
                raise
        except PeerError as error:
            if error.code is not Code.BROKER_UNREACHABLE or loop.now_s() > give_up_s:
                raise
