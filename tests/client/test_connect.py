"""Which authorities the commands trust that look at a server."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.client.metrics import get_ssl_context
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
