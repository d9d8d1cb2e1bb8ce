"""A headless Chromium that looks at the built book and reaches nothing but it."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

SITE = Path(__file__).resolve().parents[2] / "_build" / "html"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()


def chromium_path() -> str:
    """The system's Chromium or Chrome (or CHROMIUM's). Raises FileNotFoundError with what to do."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    for name in filter(None, names):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("no Chromium: apt-get install chromium, or name one in the environment variable CHROMIUM")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def end_headers(self):
        self.send_header("LinkChecker", "welcome")  # else linkchecker waits between its requests
        super().end_headers()


@contextmanager
def served(folder: Path = SITE):
    """The folder on a free local port; yields its address without a slash at the end."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def browser():
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            yield running
        finally:
            running.close()


class Visit:
    """One page in one window: opened, with what went wrong on the way.

    foreign: addresses outside the site that the page asked for (refused). broken: local ones that did not answer well.
    errors: the console's errors and uncaught exceptions.
    """

    def __init__(self, running, address: str, path: str, width: int = 1280, dark: bool = False):
        self.foreign: list[str] = []
        self.broken: list[str] = []
        self.errors: list[str] = []
        self.context = running.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("response", lambda r: r.status >= 400 and self.broken.append(f"{r.status} {r.url}"))

        def gate(route):
            url = route.request.url
            if url.startswith((address + "/", "data:", "blob:")):
                return route.continue_()
            self.foreign.append(url)
            return route.abort()

        self.context.route("**/*", gate)
        self.page.goto(f"{address}/{path}", wait_until="load")
        self.page.wait_for_timeout(150)  # scripts that start on load

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()
