# SPDX-License-Identifier: MIT
"""Stands in for `vllm serve` in tests of the soak: a server that does everything right."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


def answer(request: httpx.Request) -> httpx.Response:
    """The right answer to every kind of request."""
    try:
        body = json.loads(request.content)
        prompt = body["prompt"]
        good = body["model"] in ("m", "soak") and isinstance(prompt, str)
        good = good and isinstance(body["max_tokens"], int) and body.get("temperature", 0) >= 0
    except (ValueError, KeyError):
        good = False
    if not good or len(prompt.split()) > 100:
        return httpx.Response(400)
    if body.get("stream"):
        return httpx.Response(200, text="data: {}\n\ndata: {}\n\ndata: [DONE]\n\n")
    choice = {
        "text": '{"city": "Rome", "rank": 1}',
        "logprobs": {"token_logprobs": [-0.5]},
    }
    choices = [choice] * body.get("n", 1)
    return httpx.Response(200, json={"choices": choices, "usage": {"completion_tokens": 1}})


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(httpx.Response(200, text="vllm:num_requests_running{} 0.0\n"))

    def do_POST(self) -> None:
        time.sleep(0.01)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(answer(httpx.Request("POST", "http://s", content=content)))

    def reply(self, response: httpx.Response) -> None:
        self.send_response(response.status_code)
        self.send_header("Content-Length", str(len(response.content)))
        self.end_headers()
        self.wfile.write(response.content)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
