"""A receiver of OTLP over HTTP on this machine, which parses the protocol's own messages."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

REQUESTS = {
    "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
    "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
}


class Received:
    """What came, as the messages of opentelemetry-proto."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: dict[str, list[Any]] = {path: [] for path in REQUESTS}
        self.faults: list[str] = []
        self.endpoint = ""

    def take(self, path: str, body: bytes) -> None:
        with self._lock:
            if path not in REQUESTS:
                self.faults.append(path)
                return
            self.requests[path].append(REQUESTS[path].FromString(body))

    def spans(self, name: str | None = None) -> list[Any]:
        with self._lock:
            return [
                span
                for request in self.requests["/v1/traces"]
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
                if name in (None, span.name)
            ]

    def services(self) -> set[str]:
        with self._lock:
            return {
                entry.value.string_value
                for request in self.requests["/v1/traces"]
                for resource in request.resource_spans
                for entry in resource.resource.attributes
                if entry.key == "service.name"
            }

    def metrics(self) -> set[str]:
        with self._lock:
            return {
                metric.name
                for request in self.requests["/v1/metrics"]
                for resource in request.resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
            }


@contextmanager
def receiving() -> Iterator[Received]:
    """Receive on a free port; `endpoint` is what OTEL_EXPORTER_OTLP_ENDPOINT takes."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.take(self.path, body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attribute(span: Any, name: str) -> Any:
    """The value of a span's attribute; None: it has none."""
    for entry in span.attributes:
        if entry.key == name:
            return getattr(entry.value, entry.value.WhichOneof("value"))
    return None
