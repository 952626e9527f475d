"""Serve a run's report on this machine, written anew when its records have changed."""

import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.run_records import find_run_dir
from cb_rollout.server.options import is_loopback_authority
from cb_rollout.tools.report.page import PAGES_DIR, html_page, write_report
from cb_rollout.tools.report.tokens import visible_html

LOOPBACK = "127.0.0.1"


class LiveReport(ThreadingHTTPServer):
    """A server of one run's report, on the loopback address alone."""

    daemon_threads = True

    def __init__(self, run_dir: str | os.PathLike[str], port: int, refresh_seconds: int) -> None:
        """Bind to a port, 0: a free one, or raise `ConfigurationError`."""
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"port {port} fails ({error}); pass --port.") from error
        self.url = f"http://{LOOPBACK}:{self.server_port}/"
        self._run_dir, self._refresh_seconds = Path(run_dir), refresh_seconds
        self._lock, self._state, self._page = Lock(), (), ""

    def page(self) -> str:
        """Return the report of the records as they are now, or why there is none yet."""
        with self._lock:
            try:
                folder = find_run_dir(self._run_dir)
                stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.jsonl"))]
                state = tuple((name, found.st_mtime_ns, found.st_size) for name, found in stats)
                if state != self._state:
                    self._page = write_report(folder).read_text(encoding="utf-8")
                    self._state = state
                page = self._page
            except (ConfigurationError, OSError) as error:
                page = html_page("waiting", f"<h1>Waiting</h1><p>{visible_html(str(error))}</p>")
        refresh = f'<meta http-equiv="refresh" content="{self._refresh_seconds}">'
        return page.replace("<head>", f"<head>\n{refresh}", 1)

    def page_of_step(self, name: str) -> str | None:
        """Return a page of sequences; None: there is none of this name."""
        try:
            paths = (find_run_dir(self._run_dir) / PAGES_DIR).iterdir()
            return {path.name: path for path in paths}[name].read_text(encoding="utf-8")
        except (ConfigurationError, OSError, KeyError):
            return None


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with the report, or a page of sequences."""
        # A page of another site may name this address by a host of its own.
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not is_loopback_authority(hosts[0].strip(" \t")):
            return self.send_error(HTTPStatus.FORBIDDEN, "open the address that was printed")
        assert isinstance(self.server, LiveReport)
        folder, _, name = self.path.lstrip("/").rpartition("/")
        page = self.server.page_of_step(name) if folder == PAGES_DIR else None
        if not folder and name in ("", "report.html"):
            page = self.server.page()
        if page is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        content = page.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for each request."""
