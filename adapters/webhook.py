"""Webhooks: alerts and rollbacks to a web address, from a thread that training never waits for.

loss_fn, sample_q = guard(None, sample_q, sinks=[WebhookSink("https://hooks.slack.com/...")])
"""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from ebmguard.errors import MISFITS, ConfigError, printable, typed
from ebmguard.sinks import LEVEL_NUMBERS, Sink, to_json

__all__ = ["WebhookSink"]

_log = logging.getLogger("ebmguard")

# Messages that wait for the server. Alerts have a cool-down: more means hours without a server.
_CAPACITY = 100
_PAUSES = (1.0, 4.0, 16.0)  # seconds before the second, third and fourth attempt
_EXIT_WAIT = 10.0  # seconds
_PASSING = (408, 429)  # time-out, too many requests: the only refusals worth another attempt


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without its body: it looks delivered and is not."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


@typed
class WebhookSink(Sink):
    """POSTs every alert from a level on, and every rollback, as JSON to an address.

    The body is an object with ``title``, ``text`` (what Slack and its like show), ``level``,
    ``kind`` (``"alert"`` or ``"recovery"``) and ``record``, with NaN and infinities as in
    :class:`ebmguard.sinks.JsonlSink`. A daemon thread sends messages in order, and tries one up to
    four times; it ends when none is left. A failed delivery is logged as an error that names only
    the host, because such addresses hold a secret, and nothing of what the server says. At exit the
    process waits up to ten seconds for the rest of all sinks.

    Args:
        url: an http or https address; nothing is sent there at construction.
        min_level: the lowest level of an alert that is sent.
        title: comes first in the text; the run's name is a good one.
        timeout: seconds for one attempt.
    """

    def __init__(
        self,
        url: str,
        *,
        min_level: Literal["INFO", "WARN", "ERROR"] = "WARN",
        title: str = "ebmguard",
        timeout: float = 10.0,
    ) -> None:
        self._host, self._url = _host(url), url
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout!r}; expected seconds above 0, such as 10.")
        self.min_level, self.title, self.timeout = min_level, title, timeout
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._pending: deque[tuple[str, bytes]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        _SINKS.add(self)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Hand the alert to the thread, if its level is high enough."""
        if LEVEL_NUMBERS[record["level"]] >= LEVEL_NUMBERS[self.min_level]:
            self._send("alert", record["level"], record)

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Hand the rollback to the thread, whatever ``min_level`` is."""
        self._send("recovery", "WARN", record)

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for all deliveries; return whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def _send(self, kind: str, level: str, record: Mapping[str, Any]) -> None:
        message = record["message"]
        body = {"title": self.title, "text": f"{self.title}: {message}", "level": level}
        body |= {"kind": kind, "record": to_json(record)}
        with self._changed:
            if len(self._pending) >= _CAPACITY:
                self._report(f"is {_CAPACITY} messages behind", message)
                return
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="ebmguard", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads, or the interpreter shuts down
                    self._report(f"cannot be called: {error}", message)
                    return
            self._pending.append((message, json.dumps(body, allow_nan=False).encode()))

    def _work(self) -> None:
        while True:
            with self._changed:
                message, data = self._pending[0]
            if reason := self._refusal(data):
                self._report(reason, message)
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()
                if not self._pending:
                    self._thread = None
                    return

    def _refusal(self, data: bytes) -> str:
        """Deliver a message, and return why it was given up; empty if it was delivered."""
        reason = ""
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
            try:
                with self._opener.open(request, timeout=self.timeout):
                    return ""
            except urllib.error.HTTPError as error:
                error.close()
                phrase = http.client.responses.get(error.code, "of no standard")
                reason = f"answers {error.code} {phrase}"
                if error.code < 500 and error.code not in _PASSING:
                    return reason
            except OSError as error:
                reason = f"cannot be reached: {type(error).__name__}: {printable(error)}"
            except (http.client.HTTPException, *MISFITS) as error:  # which quotes the answer
                reason = f"answers what is no HTTP: {type(error).__name__}"
        return f"{reason}, after {1 + len(_PAUSES)} attempts"

    def _report(self, problem: str, lost: str) -> None:
        _log.error("The webhook at %s %s. Not delivered: %s", self._host, problem, lost)


_SINKS: weakref.WeakSet[WebhookSink] = weakref.WeakSet()


@atexit.register
def _deliver_rest() -> None:
    end = time.monotonic() + _EXIT_WAIT
    for sink in [*_SINKS]:
        if not sink.wait(max(0.0, end - time.monotonic())):
            left = "; ".join(message for message, _ in [*sink._pending])
            sink._report("has not taken everything when the process ends", left)


def _host(url: str) -> str:
    wrong = "is no web address. Pass https://host/path whole, as the webhook's settings show it"
    with suppress(ValueError):  # no number as the port, or a bracket too few
        parts = urllib.parse.urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if is_plain and parts.scheme in ("http", "https") and parts.port != 0 and parts.hostname:
            parts.hostname.encode("idna")  # as it is asked for: no label is empty or too long
            if "@" not in parts.netloc:
                return parts.hostname
            wrong = "has a user or a password before its host. Put the secret into its path"
    raise ConfigError(f"url= of a WebhookSink {wrong} (not repeated here: it holds a secret).")
