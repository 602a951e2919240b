"""A server's side and an application's side of ASGI, with the middleware between them."""

import asyncio
import json

from tenuto.core.requests import CONVERSATION_FIELD
from tenuto.vllm import Middleware

CHAT = "/v1/chat/completions"
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Grüße 😀"}], "temperature": 1e-1}


class App:
    """Reads a request to its end and remembers all it saw."""

    def __init__(self):
        self.received = []

    async def __call__(self, scope, receive, send):
        self.scope, self.receive, self.send = scope, receive, send
        while not self.received or self.received[-1].get("more_body"):
            self.received.append(await receive())

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.received)

    @property
    def headers(self):
        return {name.decode(): value.decode("latin-1") for name, value in self.scope["headers"]}


def make_scope(headers=(), path=CHAT, method="POST"):
    pairs = headers.items() if isinstance(headers, dict) else headers
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    return {"type": "http", "method": method, "path": path, "headers": encoded}


def run(messages, scope=None, **settings):
    """Hand messages to the middleware, one at a time; returns what the app behind it saw."""
    app, left = App(), list(messages)

    async def receive():
        return left.pop(0)

    async def send(message):
        raise AssertionError(message)

    asyncio.run(Middleware(app, **settings)(scope or make_scope(), receive, send))
    return app


def post(body, headers=(), path=CHAT, **settings):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-length": str(len(body)), **dict(headers)}
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    return run(messages, make_scope(headers, path), **settings)


def get_xargs(*args, **kwargs):
    """The `vllm_xargs` that arrive, without the conversation's name; None if there are no others."""
    xargs = json.loads(post(*args, **kwargs).body).get("vllm_xargs")
    return {name: xargs[name] for name in xargs if name != CONVERSATION_FIELD} or None if xargs else xargs


def only_names_the_conversation(body, headers=()):
    """Whether the conversation's name is all that the middleware adds to a request."""
    sent = json.loads(post(body, headers).body)
    named = sent.pop("vllm_xargs", {}).keys() == {CONVERSATION_FIELD}
    return named and sent == json.loads(json.dumps(body))
