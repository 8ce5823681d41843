"""One runtime of the broker benchmark, in a process of its own: ``python -m glasshouse.bench.broker.runtime``.

It does what the agent does, with the agent's own code: `runtime.attest` over `runtime.gate`, a connection for each
request, silence tried again. The release is opened and compared with the package's key commitment, as the
custodian does. Keys and launches exist before the clock starts.

Standard input: one JSON line, ``{"url": text, "work": [...]}`` or ``{"url": text, "bare": [[path, bytes], ...]}``;
then, once this process has said ``ready``, one line with the moments to begin and to stop (nanoseconds of the
monotonic clock, which all processes of a machine share). Standard output: ``ready``, then one JSON line with a
record for each exchange.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from glasshouse.attestation.claims import Claims
from glasshouse.attestation.hardening import CHECKS, CheckResult, HardeningReport, SecretMemoryKind, WorkspaceKind
from glasshouse.bench.broker.owner import MEASUREMENT
from glasshouse.errors import GlasshouseError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import Challenge
from glasshouse.package.layout import check_commitment
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.runtime.attest import attest
from glasshouse.runtime.gate import TIMEOUT_S, Gate
from glasshouse.runtime.loop import Loop
from glasshouse.wire.fields import b64decode
from glasshouse.wire.hpke import RecipientKey
from glasshouse.wire.kdf import sha256
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import State

__all__ = ["main"]


class _TimedGate(Gate):
    """The agent's gate, and how long each of its requests took."""

    def __init__(self, url: str, loop: Loop) -> None:
        super().__init__(url, loop)
        self.requests: list[tuple[str, int]] = []

    def post(self, path: str, body: bytes, *, timeout_s: float = TIMEOUT_S) -> bytes:
        begin = time.perf_counter_ns()
        try:
            return super().post(path, body, timeout_s=timeout_s)
        finally:
            self.requests.append((path, time.perf_counter_ns() - begin))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """Something to do and time, and what a release in it is known by."""

    do: Callable[[], None]
    run_id: str
    hpke_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Runtime:
    """One launch, and the keys that its runtime made for it."""

    loop: Loop
    gate: Gate
    launch: LaunchFile
    manifest: Manifest
    evidence: SigningKey
    hpke: RecipientKey

    def exchange(self) -> None:
        """Attest and open the release.

        Raises:
            GlasshouseError: there is none, or not the right one.
        """
        release = attest(
            loop=self.loop,
            gate=self.gate,
            launch=self.launch,
            manifest=self.manifest,
            evidence_key=self.evidence,
            claims=self._claims,
            sent=lambda _evidence: None,
        ).release
        package_key = self.hpke.open(release.sealed_key, info=release.info)
        check_commitment(package_key, self.manifest.package_id, self.manifest.key_commitment)

    def _claims(self, challenge: Challenge, now_us: int) -> Claims:
        return Claims(
            nonce=challenge.nonce,
            issued_us=now_us,
            started_us=now_us,
            manifest_sha256=self.manifest.sha256,
            package_id=self.manifest.package_id,
            deployment=challenge.deployment,
            run_id=self.launch.run_id,
            container_id=self.launch.container_id,
            container_source=self.launch.container_source,
            measurement=MEASUREMENT,
            environment_sha256=bytes(32),
            hardening=_HARDENED,
            state=State.MEASURED,
            gpus=(),
            assurance=Assurance.SOFTWARE,
            hpke_public=self.hpke.public,
            evidence_public=self.evidence.public,
            token=self.launch.token,
        )


# A report that every check of the profile accepts: the broker reads and judges it like any other.
_HARDENED = HardeningReport(
    profile=Profile.STANDARD,
    anti_debug=True,
    agent=dict.fromkeys(CHECKS["agent"], CheckResult.PASSED),
    worker=dict.fromkeys(CHECKS["worker"], CheckResult.PASSED),
    workspace=WorkspaceKind.TMPFS_NOSWAP,
    secret_memory=SecretMemoryKind.MEMFD_SECRET,
)


def main() -> int:
    """Prepare, wait for the word, exchange until the time is up or the launches are."""
    task = json.loads(sys.stdin.readline())
    loop = Loop()
    gate = _TimedGate(task["url"], loop)
    exchanges = _bare(gate, task["bare"]) if "bare" in task else iter([*_prepared(loop, gate, task["work"])])
    gc.collect()
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    begin_ns, stop_ns = map(int, sys.stdin.readline().split())
    time.sleep(max(0, begin_ns - time.perf_counter_ns()) / 1e9)
    cpu_s = time.process_time()
    records = list(_timed(gate, exchanges, stop_ns))
    report = {"records": records, "cpu_s": time.process_time() - cpu_s, "ended_ns": time.perf_counter_ns()}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def _timed(gate: _TimedGate, exchanges: Iterator[_Exchange], stop_ns: int) -> Iterator[dict[str, Any]]:
    """Do one exchange after the other and yield what each came to."""
    while time.perf_counter_ns() < stop_ns and (exchange := next(exchanges, None)) is not None:
        gate.requests, begin_ns, code = [], time.perf_counter_ns(), ""
        try:
            exchange.do()
        except GlasshouseError as error:
            code = error.code.value
        end_ns = time.perf_counter_ns()
        yield {
            "begin_ns": begin_ns,
            "end_ns": end_ns,
            "code": code,
            "requests": gate.requests,
            "run_id": exchange.run_id,
            "hpke_sha256": exchange.hpke_sha256,
        }


def _prepared(loop: Loop, gate: Gate, work: list[dict[str, Any]]) -> Iterator[_Exchange]:
    for part in work:
        manifest = parse_signed(b64decode(part["manifest"]))
        for text in part["launches"]:
            runtime = _Runtime(
                loop=loop,
                gate=gate,
                launch=LaunchFile.parse(b64decode(text)),
                manifest=manifest,
                evidence=SigningKey.generate(),
                hpke=RecipientKey.generate(),
            )
            yield _Exchange(
                do=runtime.exchange, run_id=runtime.launch.run_id, hpke_sha256=sha256(runtime.hpke.public).hex()
            )


def _bare(gate: Gate, requests: list[tuple[str, int]]) -> Iterator[_Exchange]:
    """Yield exchanges that are as many requests of the same sizes, to a server that does nothing with them."""
    bodies = [(path, b"[" + b" " * (size - 2) + b"]") for path, size in requests]

    def do() -> None:
        for path, body in bodies:
            gate.post(path, body)

    while True:
        yield _Exchange(do=do, run_id="", hpke_sha256="")


if __name__ == "__main__":
    sys.exit(main())
