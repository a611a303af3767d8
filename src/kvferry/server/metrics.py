"""`/metrics` and `/health` over HTTP, in threads of their own that ask the loop."""

from __future__ import annotations

import functools
import http.server
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
from kvferry.server.prometheus import PREFIX, metrics_of
from kvferry.server.snapshots import Snapshot
from kvferry.settings import split_host_port

_LOG = logging.getLogger(__name__)

_REQUEST_S = 5.0
_MAX_REQUESTS = 16
_POLL_S = 0.1

Take = Callable[[], Snapshot]


class MetricsServer:
    """Serves one server's metrics. One thread accepts, and one a request answers, of which there are at most 16.

    Listens from the start on; `start` begins to answer.
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
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kvferry-metrics", daemon=True
        )

    def __repr__(self) -> str:
        return f"<MetricsServer at {self.url}>"

    def start(self) -> None:
        """Start the thread that accepts."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; requests that are being answered end within their time limit. Idempotent."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _HttpServer(socketserver.ThreadingTCPServer):
    """A thread a request, but not more than there are slots: further connections are closed at once."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, place: Any, handler: Callable[..., _Handler]) -> None:
        self.address_family = family
        self._slots = threading.BoundedSemaphore(_MAX_REQUESTS)
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
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()  # there was no thread
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.info("a request for metrics from %s ended early", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request; each wait for the client has a limit."""

    timeout = _REQUEST_S
    server_version = f"kvferry/{__version__}"
    sys_version = ""

    def __init__(self, take: Take, *arguments: Any) -> None:
        self._take = take
        super().__init__(*arguments)

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

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Collector(Collector):
    """One snapshot, for one scrape."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        values = {**self._snapshot.values, "healthy": float(self._snapshot.report.healthy)}
        yield from metrics_of(values)
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
    return json.dumps({"healthy": report.healthy, "reasons": report.reasons}).encode() + b"\n"
