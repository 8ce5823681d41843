"""A played runtime that leaves what a real one does in a folder: log, heads, sealed files, receipt; all signed."""

from __future__ import annotations

import secrets
from pathlib import Path

from glasshouse.evidence.bundle import Bundle, ReceiptAnswer
from glasshouse.evidence.events import EventType
from glasshouse.evidence.receipt import Output
from glasshouse.tamper.stage import Actor
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import State
from simulators.reporting import Reporter, release_to


class LeftRun:
    """A run that was released to, and trains.

    Args:
        actor: who plays it.
        out: its folder.
    """

    def __init__(self, actor: Actor, out: Path) -> None:
        self.out = out
        for name in ("outputs", "log"):
            (out / name).mkdir(parents=True)
        release_to(actor)
        self.actor = actor
        self.reporter = Reporter(actor, self._append)
        self.outputs: list[Output] = []
        self.segments = 0
        states = list(State)
        self.reporter.go_on(*states[1 : states.index(State.RUNNING) + 1])

    @property
    def run_id(self) -> str:
        return self.actor.launch.run_id

    def _append(self, line: bytes) -> None:
        with (self.out / "events.log").open("ab") as log:
            log.write(line)

    def output(self, content: bytes) -> Output:
        """Seal an output, whatever that is made of, and put it down in the log."""
        output = Output(
            kind="output",
            of="file",
            sequence=len(self.outputs),
            plain_bytes=len(content),
            plain_hmac=None,
            sealed_bytes=len(content),
            sealed_sha256=sha256(content),
        )
        (self.out / output.file_name).write_bytes(content)
        self.outputs.append(output)
        body = {"bytes": len(content), "class": "file", "kind": "output", "sealed_bytes": len(content)}
        more = {"sealed_sha256": output.sealed_sha256.hex(), "sequence": output.sequence}
        self.reporter.log.append(EventType.OUTPUT, body | more)
        return output

    def segment(self, content: bytes) -> None:
        """Seal a piece of what its worker prints."""
        (self.out / "log" / f"{self.segments:04d}.sealed").write_bytes(content)
        more = {"sealed_bytes": len(content), "sealed_sha256": sha256(content).hex(), "sequence": self.segments}
        self.reporter.log.append(EventType.SEGMENT, more)
        self.segments += 1

    def countersign(self) -> bytes:
        """Have the log as it is countersigned."""
        reply = self.reporter.send(self.reporter.submission())
        assert reply.status == 200, reply.body
        with (self.out / "heads.log").open("ab") as heads:
            heads.write(reply.body + b"\n")
        return reply.body

    def end(self, *, named: list[Output] | None = None) -> None:
        """End, and leave a receipt that names all outputs, or those that are given."""
        self.reporter.end()
        head = self.countersign()
        receipt = self.reporter.signed_receipt(outputs=self.outputs if named is None else named)
        reply = self.actor.post("/v1/receipt", self.reporter.submit(receipt))
        assert reply.status == 200, reply.body
        self.leave_bundle(receipt, head, ReceiptAnswer.parse(reply.body).countersignature)

    def leave_bundle(self, receipt: Envelope, head: bytes, countersignature: bytes) -> None:
        bundle = Bundle(
            delegation=self.actor.owner.delegation,
            manifest=None,
            token=self.actor.launch.token,
            evidence=None,
            ear=None,
            head=Envelope.parse(head, max_bytes=8192),
            receipt=receipt,
            countersignature=Envelope.parse(countersignature, max_bytes=8192),
        )
        (self.out / "receipt.json").write_bytes(bundle.encode())


def noise(length: int) -> bytes:
    """Return what a sealed file looks like to who cannot open it."""
    return secrets.token_bytes(length)
