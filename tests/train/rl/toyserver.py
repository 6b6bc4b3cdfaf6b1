"""A small inference server on 127.0.0.1 that speaks what vLLM and SGLang speak, and serves a real (tiny) model.

It answers `/v1/completions` as a stream of tokens, loads weights from a folder at `/update_weights_from_disk`, and
tells their version at `/model_info`. Tests make it misbehave through `fault`.
"""

from __future__ import annotations

import base64
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from model import load_pretrained
from model.generation import Generator, Request, Sample


@dataclass
class Fault:
    """How an answer goes wrong. status, headers, text: instead of tokens. cut: break the connection off behind so many
    tokens. silent: say nothing more behind so many. change: of every event.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    cut: int | None = None
    silent: int | None = None
    change: Callable[[dict[str, Any]], Any] | None = None


class ToyServer:
    """Serves from its construction until ``close``. bodies, times: of completions asked for. paths: of all requests.

    fault: (number of the completion, its body) -> what goes wrong with it. version: told instead of the loaded one.
    hold: it waits once every response has so many tokens; the last of them is not sent yet.
    """

    def __init__(self, port: int = 0, key: str | None = None, hold: float = math.inf):
        self.key, self.hold = key, hold
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.fault: Callable[[int, dict[str, Any]], Fault | None] = lambda number, body: None
        self.refuse_weights = False
        self.version: str | None = None
        self.folder: Path | None = None
        self.generator: Generator | None = None
        self.lock, self.noting = threading.Lock(), threading.Lock()
        self.streams: dict[int, tuple[Sample, SimpleQueue, list[int]]] = {}
        self.closed = threading.Event()
        self.connections: list[socket.socket] = []
        handler = type("Handler", (_Handler,), {"toy": self})
        self.http = _Listener(("127.0.0.1", port), handler)
        self.http.connections = self.connections
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._serve, self._generate)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Gone, with all connections broken off."""
        self.closed.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            reset(connection)
        for thread in self.threads:
            thread.join()

    def load(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refuse_weights:
            return 400, {"success": False, "message": "out of memory"}
        with self.lock:
            self.folder = Path(body["model_path"])
            self.generator = Generator(load_pretrained(self.folder).eval(), max_running=64, record_routing=True)
            self.streams.clear()
            self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def begin(self, body: dict[str, Any]) -> tuple[int, Sample, SimpleQueue]:
        names = ("max_tokens", "temperature", "top_p", "seed")
        options = {name: body[name] for name in names}
        request = Request(tuple(body["prompt"]), **options, stop=frozenset(body["stop_token_ids"]))
        with self.lock:
            number = self.generator.submit(request)
            sample, events = self.generator.waiting[-1].sample, SimpleQueue()
            self.streams[number] = (sample, events, [0])
        return number, sample, events

    def drop(self, number: int) -> None:
        with self.lock:
            if self.streams.pop(number, None) is None:
                return
            for running in self.generator.running:
                if running.sample.id == number:
                    self.generator.cache.close(running.row)
            self.generator.running = [r for r in self.generator.running if r.sample.id != number]

    def _serve(self) -> None:
        self.http.serve_forever(poll_interval=0.02)

    def _generate(self) -> None:
        while not self.closed.is_set():
            with self.lock:
                busy = any(len(sample.tokens) < self.hold for sample, *_ in self.streams.values())
                done = self.generator.step() if busy else []
                for sample, events, sent in self.streams.values():
                    for place in range(sent[0], len(sample.tokens)):
                        events.put((sample.tokens[place], sample.log_probs[place]))
                    sent[0] = len(sample.tokens)
                for sample in done:
                    if sample.id in self.streams:
                        self.streams.pop(sample.id)[1].put(None)
            time.sleep(0 if busy else 0.002)

    def note(self, body: dict[str, Any]) -> int:
        """The number of a completion that is asked for."""
        with self.noting:
            self.times.append(time.monotonic())
            self.bodies.append(body)
            return len(self.bodies) - 1


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    connections: list[socket.socket]

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address


class _Handler(BaseHTTPRequestHandler):
    toy: ToyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.toy.paths.append(self.path)
        if self.path == "/model_info":
            self._answer(200, {"model_path": str(self.toy.folder), "weight_version": self.toy.version})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        toy = self.toy
        toy.paths.append(self.path)
        toy.headers.append(dict(self.headers))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/update_weights_from_disk":
            self._answer(*toy.load(body))
        elif self.path != "/v1/completions":
            self._answer(404, {"detail": "Not Found"})
        elif toy.key and self.headers.get("Authorization") != f"Bearer {toy.key}":
            said = f"wrong key in {self.headers.get('Authorization')}"
            self._answer(401, {"error": {"message": said}})
        else:
            self._complete(body, toy.fault(toy.note(body), body) or Fault())

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _complete(self, body: dict[str, Any], fault: Fault) -> None:
        if fault.status:
            self._answer(fault.status, {"error": {"message": fault.text}}, fault.headers)
            return
        number, sample, events = self.toy.begin(body)
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._stream(body, sample, events, fault)
        except (OSError, ValueError):  # the other side has closed, or this one was closed
            pass
        finally:
            self.toy.drop(number)
            self.close_connection = True

    def _stream(self, body: dict[str, Any], sample: Sample, events: SimpleQueue, fault: Fault) -> None:
        sent, drawn = 0, events.get()
        while drawn is not None:
            if fault.cut == sent:
                reset(self.connection)
                return
            if fault.silent == sent:
                self.toy.closed.wait()
                return
            following = events.get()
            token, log_prob = drawn
            choice = {"index": 0, "text": "x", "finish_reason": None if following else sample.finish}
            choice["logprobs"] = {"tokens": ["x"], "token_logprobs": [log_prob]}
            choice["token_ids"] = [token]
            self._event({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}, fault)
            sent, drawn = sent + 1, following
        if body.get("return_routed_experts"):
            experts = sample.routing.numpy().astype(np.int32).tobytes()
            self._event({"choices": [], "sglext": {"routed_experts": base64.b64encode(experts).decode()}}, fault)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any], fault: Fault) -> None:
        changed = fault.change(event) if fault.change else event
        text = changed if isinstance(changed, str) else json.dumps(changed)
        self._chunk(b": still here\n\ndata: " + text.encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()


def reset(connection: socket.socket) -> None:
    """Close a connection as a process that is killed does."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    except OSError:
        pass
