"""Serve a run's report on this machine, and rewrite it when its records change."""

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
    """A server of one run's report, on the loopback address only."""

    daemon_threads = True

    def __init__(self, run_dir: str | os.PathLike[str], port: int, refresh_seconds: int) -> None:
        """Bind to a port (0: a free one), or raise `ConfigurationError`."""
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"port {port} fails ({error}); pass --port.") from error
        self.url = f"http://{LOOPBACK}:{self.server_port}/"
        self._run_dir = Path(run_dir)
        self._refresh_seconds = refresh_seconds
        self._lock = Lock()
        self._page = ""
        self._state: tuple[tuple[str, int, int], ...] = ()
        """Name, time and size of each file of records that the page was written from."""

    def page(self) -> str:
        """Return the report of the current records, or a page that says why there is none yet."""
        with self._lock:
            try:
                folder = find_run_dir(self._run_dir)
                state = _state_of_records(folder)
                if state != self._state:
                    self._page = write_report(folder).read_text(encoding="utf-8")
                    self._state = state
                page = self._page
            except (ConfigurationError, OSError) as error:
                page = html_page("waiting", f"<h1>Waiting</h1><p>{visible_html(str(error))}</p>")
        refresh = f'<meta http-equiv="refresh" content="{self._refresh_seconds}">'
        return page.replace("<head>", f"<head>\n{refresh}", 1)

    def page_of_step(self, name: str) -> str | None:
        """Return a page of sequences; None if no page has this name."""
        try:
            pages_dir = find_run_dir(self._run_dir) / PAGES_DIR
            # The name comes from a client: it is compared, and is never part of a path.
            for path in pages_dir.iterdir():
                if path.name == name:
                    return path.read_text(encoding="utf-8")
        except (ConfigurationError, OSError):
            return None
        return None


def _state_of_records(folder: Path) -> tuple[tuple[str, int, int], ...]:
    files: list[tuple[str, int, int]] = []
    for path in sorted(folder.glob("*.jsonl")):
        status = path.stat()
        files.append((path.name, status.st_mtime_ns, status.st_size))
    return tuple(files)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with the report, or a page of sequences."""
        # Another site's page may reach this address under its own host name.
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not is_loopback_authority(hosts[0].strip(" \t")):
            return self.send_error(HTTPStatus.FORBIDDEN, "open the address that was printed")
        assert isinstance(self.server, LiveReport)
        folder, _, name = self.path.lstrip("/").rpartition("/")
        page = None
        if folder == PAGES_DIR:
            page = self.server.page_of_step(name)
        elif not folder and name in ("", "report.html"):
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
