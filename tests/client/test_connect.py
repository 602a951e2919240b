"""How commands look at a server: which authorities they trust, and how much of an answer they read."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tenuto.cli import main
from tenuto.client import metrics
from tenuto.client.metrics import connect, get_ssl_context
from tenuto.proxy.recorder import Tokenizer

PAGES = {
    "/tenuto/control": '{"ranks": [], "note": "nothing runs"}',
    "/tokenize": '{"tokens": [7]}',
    "/metrics": 'vllm:num_requests_running{engine="0"} 0\n',
}


class Handler(BaseHTTPRequestHandler):
    """Answers with fixed pages."""

    def do_GET(self) -> None:
        data = PAGES.get(self.path, "").encode()
        self.send_response(200 if data else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server whose certificate only $SSL_CERT_FILE vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -nodes -newkey rsa:2048 -days 2 -subj /CN=localhost"
    files = ("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate))
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    get_ssl_context.cache_clear()
    try:
        yield f"https://localhost:{server.server_port}"
    finally:
        get_ssl_context.cache_clear()
        server.shutdown()
        server.server_close()


def test_a_private_authority_is_trusted_everywhere(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "off", "--url", url, "--admin-key", "k"]) == 0
    assert "nothing runs" in capsys.readouterr().out
    assert main(["top", "--url", url, "--once", "--interval", "0.1"]) == 0
    tokenizer = Tokenizer(url, pytest.fail)
    assert tokenizer.try_tokenize({"prompt": "a"}, {}) == [7]
    tokenizer.close()


def send_without_end(handler: Handler) -> None:
    while True:
        handler.wfile.write(b"vllm:x 1\n" * 1000)


def send_slowly(handler: Handler) -> None:
    for _ in range(100):
        handler.wfile.write(b"#")
        time.sleep(0.1)


def send_compressed(handler: Handler) -> None:
    handler.wfile.write(b"\x1f\x8b")


@pytest.mark.parametrize(
    ("send", "words"),
    [
        (send_without_end, "/metrics has more than 1 MiB"),
        (send_slowly, r"no whole answer within 0\.5 s"),
        (send_compressed, "/metrics is compressed"),
    ],
)
def test_how_much_is_read_of_an_answer_is_bounded(
    send: Callable[[Handler], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_PAGE_BYTES", 2**20)

    class Odd(Handler):
        def do_GET(self) -> None:
            assert self.headers["Accept-Encoding"] == "identity"
            self.send_response(200)
            if send is send_compressed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with suppress(OSError):
                send(self)

    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with connect(url, None, 0.5) as client, pytest.raises(httpx.HTTPError, match=words):
            client.get("/metrics")
        server.shutdown()
