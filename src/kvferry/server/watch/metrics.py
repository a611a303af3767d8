"""`/metrics` and `/health` over HTTP, in threads of their own that ask the loop."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvferry import __version__
from kvferry.errors import ShareError
from kvferry.server.watch.prometheus import PREFIX, metrics_of
from kvferry.server.watch.snapshots import Snapshot
from kvferry.settings import join_host_port, split_host_port

_LOG = logging.getLogger(__name__)

_REQUEST_S = 5.0  # from the connection to the last byte of the answer
_MAX_HEAD_BYTES = 8192
_MAX_REQUESTS = 16
_MAX_THREADS = 2 * _MAX_REQUESTS
_CLOSE_S = 5.0
_POLL_S = 0.1

Take = Callable[[], Snapshot]


class MetricsServer:
    """Serves one server's metrics. One thread accepts, and one a request answers.

    16 requests are answered at a time, each within 5 s from its connection to its last byte; where more come, the
    oldest makes room, so that clients that say nothing keep nobody else away. Listens from the start on; `start`
    begins to answer.
    """

    def __init__(self, address: str, take: Take) -> None:
        """`address` is HOST:PORT; raises ShareError where it cannot be had."""
        host, port = split_host_port(address)
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _HttpServer(family, place, functools.partial(_Handler, take))
        except OSError as error:
            raise ShareError(f"metrics cannot be served at {address}: {error}; choose another address") from error
        bound = self._server.server_address
        self.url = f"http://{join_host_port(host, int(bound[1]))}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kvferry-metrics", daemon=True
        )

    def __repr__(self) -> str:
        return f"<MetricsServer at {self.url}>"

    def start(self) -> None:
        """Start the thread that accepts."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, hang up on those that are being answered, and wait for their threads. Idempotent."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(_CLOSE_S)
        self._server.server_close()
        self._server.end_requests(_CLOSE_S)


class _HttpServer(socketserver.TCPServer):
    """A thread a request. The thread that accepts is the only one that hangs up on others."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, place: Any, handler: Callable[..., _Handler]) -> None:
        self.address_family = family
        self._lock = threading.Lock()  # guards both; not held while anything is waited for
        self._open: dict[socket.socket, None] = {}  # the oldest first; without those that were hung up on
        self._threads: set[threading.Thread] = set()
        super().__init__(place, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(
                _POLL_S
            )  # no descriptors left: the connection stays where it is, and `accept` would be asked again
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; where there is none to have, for now, the connection is closed at once."""
        thread = threading.Thread(
            target=self._answer, args=(request, client_address), name="kvferry-metrics-request", daemon=True
        )
        with self._lock:
            while len(self._open) >= _MAX_REQUESTS:
                self._hang_up(next(iter(self._open)))
            full = len(self._threads) >= _MAX_THREADS  # those hung up on end as soon as the loop has answered them
            if not full:
                self._open[request] = None
                self._threads.add(thread)
        if full:
            self.shutdown_request(request)
            return
        try:
            thread.start()
        except BaseException:
            self._forget(request, thread)
            raise

    def end_requests(self, timeout_s: float) -> None:
        """Hang up on all, and wait for their threads, of which the loop answers each within a second."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            for request in list(self._open):
                self._hang_up(request)
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("a request for metrics from %s ended early", client_address, exc_info=True)

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        """In the request's thread."""
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - whatever it is, it is this client's trouble alone
            self.handle_error(request, client_address)
        finally:
            self._forget(request, threading.current_thread())
            self.shutdown_request(request)

    def _forget(self, request: socket.socket, thread: threading.Thread) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._threads.discard(thread)

    def _hang_up(self, request: socket.socket) -> None:
        """Have a request's thread find the end of its connection. Needs the lock, under which it is still open."""
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request, within a time limit for all of it."""

    server_version = f"kvferry/{__version__}"
    sys_version = ""

    def __init__(self, take: Take, *arguments: Any) -> None:
        self._take = take
        self._deadline = time.monotonic() + _REQUEST_S
        super().__init__(*arguments)

    def setup(self) -> None:
        """Read the request's head, all of it, before any of it is looked at."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._read_head())

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, _metrics(self._take()))
        elif path == "/health":
            snapshot = self._take()
            self._answer(200 if snapshot.report.healthy else 503, "application/json", _health(snapshot))
        else:
            self._answer(404, "text/plain", b"there are /metrics and /health\n")

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug("%s: %s", self.client_address, format % args)

    def _read_head(self) -> bytes:
        """Nothing where the client hangs up before its end. Raises OSError where it is too late, or too long."""
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            self._wait_no_longer()
            data = self.connection.recv(_MAX_HEAD_BYTES + 1 - len(head))
            head += data
            if len(head) > _MAX_HEAD_BYTES:
                raise OSError(f"the request's head is longer than {_MAX_HEAD_BYTES} bytes")
            if not data:
                return b""
        return head

    def _wait_no_longer(self) -> None:
        """Than until the deadline, in the next wait for the client."""
        self.connection.settimeout(max(0.001, self._deadline - time.monotonic()))

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self._wait_no_longer()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._wait_no_longer()
        self.wfile.write(body)


class _Collector(Collector):
    """One snapshot, for one scrape."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        values = {**self._snapshot.values, "healthy": float(self._snapshot.report.healthy)}
        yield from metrics_of(values)
        yield from self._snapshot.more
        build = GaugeMetricFamily(PREFIX + "build_info", "Always 1; the label says which.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build


def _metrics(snapshot: Snapshot) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _health(snapshot: Snapshot) -> bytes:
    report = snapshot.report
    warnings = {"warnings": report.warnings} if report.warnings else {}
    return json.dumps({"healthy": report.healthy, "reasons": report.reasons, **warnings}).encode() + b"\n"
