"""What stands beside the gate in a measurement, each in a process of its own, so that its cost is told apart."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import multiprocessing
import resource
import string
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from glasshouse.attestation.claims import MAX_DETAILS, MAX_GPUS, Claims, Gpu
from glasshouse.attestation.evidence import EVIDENCE_TYPE, Evidence
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.roots.kinds import MAX_BLOBS, MAX_BLOBS_BYTES
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.http.bounded import MAX_HEADER_BYTES, MAX_HEADER_LINES
from glasshouse.broker.http.endpoints import OwnerCall, add_route, bare_app
from glasshouse.broker.http.listeners import Server, bind_tcp
from glasshouse.evidence.bundle import MAX_SUBMISSION_BYTES, ReceiptSubmission
from glasshouse.evidence.receipt import (
    MAX_OUTPUTS,
    MAX_RECEIPT_BYTES,
    PREDICATE_TYPE,
    RECEIPT_TYPE,
    STATEMENT_TYPE,
    Output,
)
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import SigningKey, key_id

__all__ = [
    "ANSWERS",
    "REQUESTS",
    "beside",
    "hostile",
    "hostile_evidence",
    "hostile_receipt",
    "nothing",
    "strangers",
    "unsigned_receipts",
]

# Bytes of the messages of an exchange: challenge request, challenge; evidence, release.
REQUESTS = {"/v1/challenge": 1800, "/v1/evidence": 6200}
ANSWERS = {"/v1/challenge": 200, "/v1/evidence": 3300}
HOSTILE_BYTES = 32_000
PIECE_EVERY_S = 0.005


class Message(NamedTuple):
    """What a stranger sends.

    Attributes:
        path: of the request.
        body: of the request.
        lines: of its head, besides those that it needs.
    """

    path: str
    body: bytes
    lines: bytes = b""


@contextlib.contextmanager
def beside(play: Callable[..., Awaitable[None]], *arguments: Any) -> Iterator[tuple[int, str]]:
    """Run one of the functions below in a process; yield its id and what it tells when it is ready."""
    # Spawned: keys of the runtimes, and threads, stay here.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(play, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process.pid or 0, ours.recv()
        if not process.is_alive():
            raise SystemExit(f"{play.__name__} ended before the measurement")
    except EOFError:
        raise SystemExit(f"{play.__name__} did not start") from None
    finally:
        process.kill()
        process.join()


def _run(play: Callable[..., Any], ready: Connection, *arguments: Any) -> None:
    asyncio.run(play(ready, *arguments))


async def nothing(ready: Connection) -> None:
    """ApiAnswer requests of an exchange's sizes at once, by the broker's own listener, bounded HTTP and thread."""
    listener, url = bind_tcp("127.0.0.1", 0)
    app = bare_app()
    with listener, ThreadPoolExecutor(max_workers=1) as executor:
        for path, size in ANSWERS.items():
            answer = partial(_answer, ApiAnswer(body=b"[" + b" " * (size - 2) + b"]"))
            add_route(app, OwnerCall("POST", path, answer), executor=executor)
        server = Server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        ready.send(url)
        await serving


def _answer(answer: ApiAnswer, _body: bytes, _parameters: Mapping[str, str], _scope: object) -> ApiAnswer:
    return answer


async def strangers(ready: Connection, url: str, load: dict[str, Any], messages: list[Message]) -> None:
    """Hold idle connections and send hostile messages, bounded in number, until this process is ended.

    Args:
        ready: is told when all idle connections are there.
        url: the broker's.
        load: `addresses` they come from; `idle` connections held and `new_per_s`, each with the begin of a message
            where `slow`; `hostile_per_s` messages, each whole or by `piece_bytes`.
        messages: sent in turn.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    host, _, port = url.removeprefix("http://").rpartition(":")
    addresses, bodies = itertools.cycle(load["addresses"]), itertools.cycle(messages)
    connected = asyncio.Semaphore(0)

    def idle() -> asyncio.Task[None]:
        data = _head("/v1/evidence", HOSTILE_BYTES) + b"{" if load.get("slow") else b""
        return asyncio.create_task(_connection(host, int(port), next(addresses), data, connected=connected))

    def hostile() -> asyncio.Task[None]:
        path, body, lines = next(bodies)
        data = _head(path, len(body), lines) + body
        return asyncio.create_task(_connection(host, int(port), next(addresses), data, load.get("piece_bytes")))

    held: set[asyncio.Task[None]] = set()
    for _ in range(load.get("idle", 0)):
        _hold(held, idle())
        await connected.acquire()
    keeping = (
        [_keep(set(), hostile, load["hostile_per_s"], 4 * load["hostile_per_s"])] if "hostile_per_s" in load else []
    )
    if held:
        keeping.append(_keep(held, idle, load["new_per_s"], 2 * load["idle"]))
    ready.send("ready")
    await asyncio.gather(*keeping)


async def _keep(held: set[asyncio.Task[None]], begin: Callable[[], asyncio.Task[None]], per_s: int, most: int) -> None:
    """Begin so many connections a second; of more than `most` at once, one is given up for each."""
    loop = asyncio.get_running_loop()
    until = loop.time()
    while True:
        if len(held) >= most:
            held.pop().cancel()
        _hold(held, begin())
        until += 1 / per_s
        await asyncio.sleep(max(0, until - loop.time()))


def _hold(held: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    held.add(task)
    task.add_done_callback(held.discard)


async def _connection(
    host: str,
    port: int,
    source: str,
    data: bytes,
    piece_bytes: int | None = None,
    *,
    connected: asyncio.Semaphore | None = None,
) -> None:
    """Connect, send, and stay until the broker closes the connection or the task is cancelled."""
    size = piece_bytes or len(data) or 1
    with contextlib.suppress(OSError):
        try:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
        finally:
            if connected is not None:
                connected.release()
        try:
            for start in range(0, len(data), size):
                if start:
                    await asyncio.sleep(PIECE_EVERY_S)
                if writer.is_closing():
                    break
                writer.write(data[start : start + size])
            await reader.read()
        finally:
            writer.close()


def _head(path: str, length: int, further: bytes = b"") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", "")
    return "\r\n".join(lines).encode() + further + b"\r\n"


def hostile() -> list[Message]:
    """Return messages of 32 KB that cost a reader as much as such a message can, as far as is known."""
    room = HOSTILE_BYTES - 2
    bombs = [
        b"[" + b"0," * (room // 2 - 1) + b"0]",
        b"[" + b"{}," * (room // 3 - 1) + b"{}]",
        b"[" + b"[[[0]]]," * (room // 8 - 1) + b"0]",
        b"{" + b",".join(b'"%05d":0' % number for number in range(room // 10)) + b"}",
        b"[" * room,
        b'"' + b"\\u00e9" * (room // 6) + b'"',
        b'"' + "é".encode() * (room // 2) + b'"',
        b"9" * room,
    ]
    inner = room * 3 // 4 - 600
    deep = [_deep("\U0001f600", 1, inner, chains=66), _deep("k", 4, inner, chains=66), _deep("k", 4, inner, chains=33)]
    signature = base64.b64encode(bytes(64)).decode()
    wrapped = []
    for bomb in bombs[:4] + deep:
        value = {
            "payload": base64.b64encode(bomb[:inner]).decode(),
            "payloadType": "application/vnd.glasshouse.evidence+json",
            "signatures": [{"keyid": name * 32, "sig": signature} for name in "ab"],
        }
        wrapped.append(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
    return [Message("/v1/evidence", body) for body in (*bombs, *wrapped)]


def hostile_evidence(claims: Claims, launch_key_id: str) -> list[Message]:
    """Return long evidence that nobody signed, valid by its schema; once more with the largest head that is read.

    Args:
        claims: they name a challenge of the broker.
        launch_key_id: of the key that would have to sign, which everybody reads on the way.
    """
    gpus = [
        Gpu(name="n" * 48, memory_bytes=number, driver="d" * 48, uuid=f"{number:064}") for number in range(MAX_GPUS)
    ]
    details = {f"d{number:063}": "v" * 64 for number in range(MAX_DETAILS)}
    large = replace(claims, gpus=tuple(gpus), hardening=replace(claims.hardening, details=details))
    names = sorted((key_id(claims.evidence_public), launch_key_id))

    def made() -> bytes:
        hardware = (Blob(kind="sev-snp", size=MAX_BLOBS_BYTES // MAX_BLOBS, sha256=bytes(32)),) * MAX_BLOBS
        payload = Evidence(claims=large, composite=bytes(32), hardware=hardware).encode()
        signatures = tuple((name, bytes(64)) for name in names)
        return dsse.Envelope(payload_type=EVIDENCE_TYPE, payload=payload, signatures=signatures).encode()

    body = made()
    count = MAX_HEADER_LINES - len(_head("/v1/evidence", len(body)).splitlines())
    size = (MAX_HEADER_BYTES - len(_head("/v1/evidence", len(body)))) // count
    value = string.ascii_letters * MAX_HEADER_BYTES
    line = b"Connection: " + value[: size - len("Connection: \r\n")].encode() + b"\r\n"
    return [Message("/v1/evidence", body), Message("/v1/evidence", body, line * count)]


def unsigned_receipts(name: str, head: bytes) -> list[Message]:
    """Return the largest receipt that is opened, and long escapes in the place of its payload, type and submission.

    Args:
        name: of the run's evidence key.
        head: its last head, countersigned, by which the run has ended: everybody reads it on the way.
    """

    def made(payload: bytes, payload_type: str) -> bytes:
        signatures = ((name, bytes(64)),)
        return dsse.Envelope(payload_type=payload_type, payload=payload, signatures=signatures).encode()

    room = MAX_RECEIPT_BYTES - len(made(b"", RECEIPT_TYPE))
    escapes = 'a"' * ((MAX_RECEIPT_BYTES - len(made(b"", ""))) // 3)
    endless = b'{"payload":"' + b"\\n" * (MAX_RECEIPT_BYTES // 2 - 8)
    receipts = (made(bytes(room // 4 * 3), RECEIPT_TYPE), made(b"", escapes), endless)
    bodies = [ReceiptSubmission(receipt=receipt, head=head).encode() for receipt in receipts]
    bodies.append(made(b"", 'a"' * ((MAX_SUBMISSION_BYTES - len(made(b"", ""))) // 3)))
    return [Message("/v1/receipt", body) for body in bodies]


def _deep(letter: str, letters: int, size: int, *, chains: int) -> bytes:
    """Return an array of so many chains of 14 objects, each the only member of another, with long names."""
    name = letter * letters * (size // (14 * chains) // 4 - 2)
    value: Any = 0
    for _ in range(14):
        value = {name: value}
    return json.dumps([value] * chains, ensure_ascii=False, separators=(",", ":")).encode()


def hostile_receipt(key: SigningKey, head: bytes) -> Message:
    """Return what an attested run can have read besides: a signed receipt with all outputs, refused after them.

    Args:
        key: the run's evidence key.
        head: its last head, countersigned, by which the run has ended.
    """
    outputs: list[Json] = [
        Output(
            kind="output",
            of="weights",
            sequence=number,
            plain_bytes=1,
            plain_hmac=bytes(32),
            sealed_bytes=1,
            sealed_sha256=bytes(32),
        ).to_json()
        for number in range(MAX_OUTPUTS)
    ]
    statement: dict[str, Json] = {
        "_type": STATEMENT_TYPE,
        "predicate": {},
        "predicateType": PREDICATE_TYPE,
        "subject": outputs,
    }
    receipt = dsse.sign(RECEIPT_TYPE, encode(statement), [key])
    return Message("/v1/receipt", ReceiptSubmission(receipt=receipt.encode(), head=head).encode())
