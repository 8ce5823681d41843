"""AMD's, Intel's and NVIDIA's services on the loopback, which publish what keys of their own sign."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from glasshouse.jobs.collateral import fetched_pack, vendor_requests, vendor_services

__all__ = ["FakeVendors", "serving"]

DAY = timedelta(days=1)


@dataclass
class FakeVendors:
    """What they publish, and what goes wrong.

    Attributes:
        troubles: statuses, one a request, of what a path answers with before it is well; by the path's beginning.
        redirects, floods, cuts: paths that lead elsewhere, answer without end, or end in the middle.
        asked: method and target of each request.
        waits: in seconds, between tries.
        issued: when all of it was signed.
    """

    troubles: dict[str, list[int]] = field(default_factory=dict)
    redirects: set[str] = field(default_factory=set)
    floods: set[str] = field(default_factory=set)
    cuts: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    issued: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1))
    renamed: dict[str, str] = field(default_factory=dict)
    _made: dict[str, x509.Certificate] = field(default_factory=dict)

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(ec.SECP256R1())

    def certificate(self, name: str, *, issuer: str = "root") -> x509.Certificate:
        """Return a certificate, the same for the same name; all names have one key."""
        if name in self._made:
            return self._made[name]
        built = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(issuer))
            .public_key(self._key.public_key())
            .serial_number(int.from_bytes(name.encode()[:16], "big"))
            .not_valid_before(self.issued - 100 * DAY)
            .not_valid_after(self.issued + 1000 * DAY)
        )
        return self._made.setdefault(name, built.sign(self._key, SHA256()))

    def manifest(self, name: str) -> bytes:
        """Return a manifest, as far as a fetcher reads it."""
        chain = (self.certificate(f"signer of {name}", issuer="root"), self.certificate("root"))
        texts = [base64.encodebytes(one.public_bytes(Encoding.DER)).decode() for one in chain]
        return "".join(f"<ds:X509Certificate>{text}</ds:X509Certificate>" for text in texts).encode()

    def _list(self) -> bytes:
        built = x509.CertificateRevocationListBuilder().issuer_name(_name("root"))
        built = built.last_update(self.issued).next_update(self.issued + 90 * DAY)
        return built.sign(self._key, SHA256()).public_bytes(Encoding.DER)

    def _signed(self, member: str) -> bytes:
        dates = [f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in (self.issued, self.issued + 30 * DAY)]
        said = {"issueDate": dates[0], "nextUpdate": dates[1], "tcbEvaluationDataNumber": 20}
        body = {member: said, "signature": "00" * 64}
        return json.dumps(body, separators=(",", ":")).encode()

    def _response(self, question: bytes) -> bytes:
        request = ocsp.load_der_ocsp_request(question)
        assert isinstance(request.hash_algorithm, SHA384)
        about = {serial: certificate for certificate in self._known() if (serial := certificate.serial_number)}
        certificate = about.get(request.serial_number) or self.certificate(str(request.serial_number)[:16])
        built = ocsp.OCSPResponseBuilder().add_response(
            cert=certificate,
            issuer=self.certificate("root"),
            algorithm=SHA256(),
            cert_status=ocsp.OCSPCertStatus.GOOD,
            this_update=self.issued,
            next_update=self.issued + 7 * DAY,
            revocation_time=None,
            revocation_reason=None,
        )
        built = built.responder_id(ocsp.OCSPResponderEncoding.NAME, self.certificate("root"))
        return built.sign(self._key, SHA256()).public_bytes(Encoding.DER)

    def _known(self) -> list[x509.Certificate]:
        return [self.certificate("root")]

    def answer(self, target: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return what a request is answered with: status, headers, body."""
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        pem = quote((self.certificate("signer").public_bytes(Encoding.PEM) * 2).decode())
        if parts.path in ("/vcek/v1/Milan/crl", "/vcek/v1/Genoa/crl", "/vcek/v1/Turin/crl", "/IntelSGXRootCA.der"):
            return 200, {}, self._list()
        if parts.path == "/sgx/certification/v4/pckcrl":
            assert query["encoding"] == ["der"]
            assert query["ca"][0] in ("platform", "processor")
            return 200, {}, self._list()
        if parts.path == "/tdx/certification/v4/qe/identity":
            return 200, {"SGX-Enclave-Identity-Issuer-Chain": pem}, self._signed("enclaveIdentity")
        if parts.path == "/tdx/certification/v4/tcb" and query["fmspc"] == ["90C06F000000"]:
            return 200, {"TCB-Info-Issuer-Chain": pem}, self._signed("tcbInfo")
        if parts.path.startswith("/v1/rim/NV_GPU_DRIVER_GH100_550"):
            name = parts.path.removeprefix("/v1/rim/")
            rim = base64.b64encode(self.manifest(name)).decode()
            return 200, {}, json.dumps({"id": self.renamed.get(name, name), "rim": rim}).encode()
        if parts.path == "/" and body:
            return 200, {}, self._response(body)
        return 404, {}, b"not here"


class _NoMakers:
    def __init__(self, *_: object, now_us: int) -> None:
        self.wrong: dict[str, Exception] = {}
        self.unchecked: set[str] = set()


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVendors]:
    """Have all services stand on the loopback, and no try wait for the next."""
    vendors = FakeVendors()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            vendors.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            assert set(self.headers) <= {"Host", "Accept-Encoding", "Content-Length", "Content-Type"}
            for begin, statuses in vendors.troubles.items():
                if self.path.startswith(begin) and statuses:
                    return self._send(statuses.pop(0), {"Retry-After": "7"}, b"later")
            if self.path in vendors.redirects:
                return self._send(302, {"Location": "/vcek/v1/Milan/crl"}, b"")
            status, headers, found = vendors.answer(self.path, body)
            if self.path in vendors.floods:
                found = bytes(vendor_requests.MAX_ANSWER_BYTES + 1)
            return self._send(status, headers, found, cut=self.path in vendors.cuts)

        do_POST = do_GET  # noqa: N815 - as the server calls it

        def _send(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body[:-1] if cut else body)
            except OSError:  # the asker had enough
                self.close_connection = True
            if cut:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    for host in vendor_services.HOSTS:
        monkeypatch.setitem(vendor_services.HOSTS, host, f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(vendor_requests, "sleep", vendors.waits.append)
    monkeypatch.setattr(fetched_pack, "Makers", _NoMakers)  # whose keys are not these
    try:
        yield vendors
    finally:
        server.shutdown()
        server.server_close()
