# SPDX-License-Identifier: MIT
"""Stands in for `vllm serve` in tests of start, failure and clean-up; FAKE_MODE says how it acts.

ok | never_healthy | dies_at_start | dies_under_load | no_chat | stubborn (ignores SIGTERM and has a
child in a session of its own) | engine (has a child that is named as vLLM names its engine)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE = os.environ.get("FAKE_MODE", "ok")
LIMIT = 3  # requests until dies_under_load dies


class Handler(BaseHTTPRequestHandler):
    served = 0

    def reply(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(503 if MODE == "never_healthy" else 200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            if MODE == "no_chat":
                self.reply(400, {"error": {"message": "no chat here"}})
            else:
                self.reply(200, {"choices": [{"message": {"content": f"{body['model']}: Paris"}}]})
            return
        Handler.served += 1
        if MODE == "dies_under_load" and Handler.served > LIMIT:
            print("ValueError: the engine core has died", flush=True)
            os._exit(3)
        self.reply(200, {"choices": [{"text": " Paris"}]})

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("Model loading took 12.5 GiB memory and 3.1 seconds")
    print("Available KV cache memory: 100.25 GiB")
    print("GPU KV cache size: 1,234,567 tokens, and more", flush=True)
    if MODE == "dies_at_start":
        print("RuntimeError: out of paper")
        for line in range(50):
            print(f"trace {line}")
        sys.exit(4)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleeper, start_new_session=True)
        Path(os.environ["FAKE_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    elif "FAKE_PIDS" in os.environ:
        with Path(os.environ["FAKE_PIDS"]).open("a") as pids:
            pids.write(f"{os.getpid()} ")
    if MODE == "engine":
        command = ["VLLM::EngineCore", "-c", "import time; time.sleep(600)"]
        subprocess.Popen(command, executable=sys.executable)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(600)


if __name__ == "__main__":
    main()
