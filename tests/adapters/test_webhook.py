"""Alerts by HTTP, to a real server on this machine."""

from __future__ import annotations

import http.server
import json
import logging
import math
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ebmguard.adapters import webhook
from ebmguard.adapters.webhook import WebhookSink
from ebmguard.errors import ConfigError
from tests.parts import PATIENCE
from tests.sinks.parts import ALERT, RECOVERY

LONG = PATIENCE


class Server(http.server.ThreadingHTTPServer):
    """Keeps what is posted, and answers what it is told to: 200 after the last of ``answers``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int] = []
        self.received: list[dict[str, Any]] = []
        self.methods: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/secret"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.gate.wait(LONG)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.methods.append("POST")
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if answer == 200:
            assert self.headers["Content-Type"] == "application/json"
            self.server.received.append(json.loads(body, parse_constant=_refuse))
        self.send_response(answer)
        if answer == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.methods.append("GET")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(webhook, "_PAUSES", (0.0, 0.0, 0.0))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_an_alert_arrives_with_its_text_and_its_whole_record(server: Server) -> None:
    sink = WebhookSink(server.url, title="run 7")
    sink.write_row(7, {"energy_gap": 1.0}, {})
    sink.write_alert(ALERT | {"value": math.nan})
    sink.flush()
    assert sink.wait(LONG)
    assert server.received == [
        {
            "title": "run 7",
            "text": "run 7: ERROR energy_blowup at step 7",
            "level": "ERROR",
            "kind": "alert",
            "record": ALERT | {"value": "NaN"},
        }
    ]


@pytest.mark.parametrize(
    ("min_level", "sent"),
    [("INFO", ["INFO", "WARN", "ERROR"]), ("WARN", ["WARN", "ERROR"]), ("ERROR", ["ERROR"])],
)
def test_alerts_from_a_level_on_and_every_rollback(
    server: Server, min_level: Any, sent: list[str]
) -> None:
    sink = WebhookSink(server.url, min_level=min_level)
    for level in ("INFO", "WARN", "ERROR"):
        sink.write_alert(ALERT | {"level": level})
    sink.write_recovery(RECOVERY)
    assert sink.wait(LONG)
    assert [body["level"] for body in server.received[:-1]] == sent
    last = server.received[-1]
    assert (last["kind"], last["text"]) == ("recovery", f"ebmguard: {RECOVERY['message']}")
    assert last["record"] == RECOVERY | {"value": "Infinity"}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        *(([500], ""), ([503, 500, 502], ""), ([429], ""), ([408], "")),
        ([500] * 4, "answers 500 Internal Server Error, after 4 attempts"),
        ([404], "answers 404 Not Found"),
        ([302], "answers 302 Found"),
    ],
)
def test_what_passes_is_tried_again_in_order_and_what_is_given_up_is_logged(
    server: Server, answers: list[int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers = list(answers)
    sink = WebhookSink(server.url)
    for step in (7, 8, 9):
        sink.write_alert(ALERT | {"step": step})
    assert sink.wait(LONG)
    sent = [8, 9] if said else [7, 8, 9]
    assert [body["record"]["step"] for body in server.received] == sent
    assert server.methods == ["POST"] * (len(answers) + len(sent))
    if not said:
        assert not caplog.records
        return
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ebmguard", logging.ERROR)
    text = record.getMessage()
    assert said in text
    assert "Not delivered: ERROR energy_blowup at step 7" in text
    assert "127.0.0.1" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("pauses", "timeout", "said"),
    [
        ((0.0,), 10.0, "cannot be reached: URLError.*after 2 attempts"),
        ((), 0.05, "TimeoutError"),  # a server that never answers
    ],
)
def test_a_server_that_is_not_there_is_given_up(
    pauses: Any,
    timeout: float,
    said: str,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(webhook, "_PAUSES", pauses)
    server.gate.clear()
    url = f"http://127.0.0.1:{closed_port()}/secret" if pauses else server.url
    sink = WebhookSink(url, timeout=timeout)
    sink.write_alert(ALERT)
    assert sink.wait(LONG)
    (record,) = caplog.records
    assert re.search(said, record.getMessage())


def test_training_does_not_wait_and_what_is_too_much_is_said(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "_CAPACITY", 3)
    server.gate.clear()  # it takes connections and does not answer
    sink = WebhookSink(server.url, timeout=LONG)
    for step in range(5):
        sink.write_alert(ALERT | {"step": step, "message": f"alert {step}"})
        sink.flush()
    # All calls came back although nothing has been delivered.
    assert not server.received
    assert not sink.wait(0.0)
    assert ["alert 3" in r.getMessage() for r in caplog.records] == [True, False]
    assert all("is 3 messages behind" in r.getMessage() for r in caplog.records)
    server.gate.set()
    assert sink.wait(LONG)
    assert [body["record"]["step"] for body in server.received] == [0, 1, 2]
    sink.write_alert(ALERT | {"step": 9})
    assert sink.wait(LONG)
    assert server.received[-1]["record"]["step"] == 9


def test_where_no_thread_can_be_started_training_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sink = WebhookSink(server.url)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        sink.write_alert(ALERT)
    assert "can't start new thread" in caplog.records[0].getMessage()
    sink.write_alert(ALERT)
    assert sink.wait(LONG)
    assert len(server.received) == 1


SCRIPT = """
import sys
from ebmguard.adapters import webhook
from ebmguard.adapters.webhook import WebhookSink
webhook._EXIT_WAIT = float(sys.argv[2])
sink = WebhookSink(sys.argv[1])
for step in range(3):
    sink.write_alert({"level": "ERROR", "message": f"alert {step}", "step": step})
raise SystemExit(3)
"""


def test_the_end_of_the_process_waits_for_delivery(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url, str(LONG)], capture_output=True, check=False
    )
    assert done.returncode == 3
    assert [body["record"]["step"] for body in server.received] == [0, 1, 2]


def test_the_end_of_the_process_does_not_wait_for_ever_and_says_what_is_lost(
    server: Server,
) -> None:
    server.gate.clear()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url, "0.1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    assert done.returncode == 3
    assert "has not taken everything when the process ends" in done.stderr
    assert "alert 0; alert 1; alert 2" in done.stderr


@pytest.mark.parametrize(
    "url",
    ["", "hooks.slack.com/x", "ftp://a/b", "https://", "http://a:b/", "http://a:0/",
     "http://[::1/", "https://a/b c", "https://a/\n", "https://ä/", "http://a..b/x",
     f"http://{'a' * 64}.com/", "http://[::1]:99999/"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_repeating_it(url: Any) -> None:
    with pytest.raises(ConfigError, match="no web address"):
        WebhookSink(url)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"timeout": 0}, "expected seconds above 0"),
        ({"timeout": -1.0}, "expected seconds above 0"),
        ({"timeout": math.nan}, "expected seconds above 0"),
        ({"min_level": "LOUD"}, r"'LOUD'.*'INFO', 'WARN', 'ERROR'"),
    ],
)
def test_wrong_options_are_refused(option: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WebhookSink("https://localhost/", **option)


ODD = {
    "an escape and the secret": b"HTTP/1.1 404 \x1b]0;owned\x07 /secret\r\n\r\n",
    "a redirect to nowhere": b"HTTP/1.1 302 F\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
    "a redirect to a file": b"HTTP/1.1 308 \x1b\r\nLocation: file:///secret\x1b[2J\r\n\r\n",
    "no HTTP": b"\x1b[2J/secret\r\n\r\n",
    "no status": b"HTTP/1.1 \x1b[2J /secret\r\n\r\n",
    "a code of its own": b"HTTP/1.1 999 \x1b\r\n\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nA: " + b"\x1b" * 70_000 + b"\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_no_answer_ends_the_thread_or_is_printed(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "_PAUSES", ())
    died = list[object]()
    monkeypatch.setattr(threading, "excepthook", died.append)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    while b"}}" not in connection.recv(1 << 16):
                        pass
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        sink = WebhookSink(f"http://127.0.0.1:{listening.getsockname()[1]}/secret", timeout=LONG)
        for _ in range(2):
            sink.write_alert(ALERT)
        assert sink.wait(LONG)
        thread.join()
    assert not died
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "Not delivered" in record.getMessage()
        assert "secret" not in record.getMessage()
        assert "\x1b" not in record.getMessage()
