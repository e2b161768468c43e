"""A bare HTTP/1.1 client that notes when each piece of an answer arrived.

The SDKs hide what a router must get right: heads as sent, bytes in which read, whether a chunked
body really ended. A connection per call unless told otherwise, nothing pooled, nothing resent.

*Bound*: answers up to 64 MiB; every wait has a deadline.
*Errors*: `WireError` tells what came and what was expected.
"""

import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Tuple
from urllib.parse import urlsplit

ANSWER_BYTES_MAX = 64 << 20


class WireError(Exception):
    """The answer was not HTTP/1.1, or did not come in time."""


@dataclass
class Answer:
    """One answer; times are seconds after the last byte of the request was written."""

    status: int
    reason: str
    headers: List[Tuple[str, str]]
    body: bytes = b""
    head_s: float = 0.0
    # (when it was read, decoded body bytes in that read)
    reads: List[Tuple[float, bytes]] = field(default_factory=list)
    complete: bool = False

    def header(self, name: str) -> Optional[str]:
        """The first value of `name`, whatever its case; None when absent."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise WireError("expected JSON, got %r (%s)" % (self.body[:300], error)) from error

    def events(self) -> List[Tuple[float, str]]:
        """Server-sent events in order: (when the read that completed it came, its text)."""
        found, pending = [], b""
        for when, piece in self.reads:
            pending += piece
            while b"\n\n" in pending:
                event, pending = pending.split(b"\n\n", 1)
                found.append((when, event.decode()))
        if pending:
            raise WireError("the event stream ends in the middle of an event: %r" % pending[:300])
        return found

    def __str__(self) -> str:
        return "%d %s %r" % (self.status, self.reason, self.body[:400].decode(errors="replace"))


class Call:
    """A request that has been sent; `answer` reads all, `pieces` as it comes, `close` gives up.

    `over`: the socket of an earlier call whose answer is complete, to use its connection again.
    """

    def __init__(
        self,
        base: str,
        method: str,
        path: str,
        body: Any = None,
        headers: Dict[str, str] = {},
        timeout: float = 120.0,
        over: Optional[socket.socket] = None,
    ):
        url = urlsplit(base)
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = ["%s %s HTTP/1.1" % (method, path), "Host: %s" % url.netloc]
        if body is not None:
            lines += ["Content-Type: application/json", "Content-Length: %d" % len(payload)]
        lines += ["%s: %s" % pair for pair in headers.items()]
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.socket = over or socket.create_connection((url.hostname, url.port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.socket.settimeout(timeout)
            self.socket.sendall("\r\n".join(lines + ["", ""]).encode() + payload)
        except BaseException:
            self.socket.close()
            raise
        self.sent_at = time.monotonic()
        self.method = method
        self.buffer = b""

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self) -> Answer:
        """The whole answer. A body that breaks off is told by `complete`, not by an exception."""
        with self:
            answer = self.head()
            for when, piece in self.pieces(answer):
                answer.reads.append((when, piece))
                answer.body += piece
            return answer

    def head(self) -> Answer:
        """The final head, past any 1xx."""
        while True:
            while b"\r\n\r\n" not in self.buffer:
                if not self._read():
                    raise WireError("the connection closed before the end of a response head; got %r" % self.buffer[:300])
            head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
            first, *lines = head.decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            code, _, reason = rest.partition(" ")
            if version != "HTTP/1.1" or not (len(code) == 3 and code.isdigit()):
                raise WireError("expected a status line such as `HTTP/1.1 200 OK`, got %r" % first)
            headers = []
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon or name != name.strip() or not name:
                    raise WireError("expected `name: value`, got %r" % line)
                headers.append((name, value.strip()))
            if not code.startswith("1"):
                return Answer(int(code), reason, headers, head_s=time.monotonic() - self.sent_at)

    def pieces(self, answer: Answer) -> Iterator[Tuple[float, bytes]]:
        """(time, decoded bytes) for each read that brought body; sets `answer.complete` at a proper end."""
        coding = (answer.header("transfer-encoding") or "").lower()
        length = answer.header("content-length")
        if coding and length is not None:
            raise WireError("the answer has both Transfer-Encoding and Content-Length")
        if self.method == "HEAD" or answer.status in (204, 304):
            answer.complete = True
            return
        total = 0
        chunks = Chunks() if coding == "chunked" else None
        missing = int(length) if length is not None else None
        came = bool(self.buffer)
        while True:
            if came:
                data, self.buffer = self.buffer, b""
                if chunks is not None:
                    piece = chunks.feed(data)
                    answer.complete = chunks.ended
                elif missing is not None:
                    piece = data[:missing]
                    if len(data) > missing:
                        raise WireError("%d bytes after the end of the body: %r" % (len(data) - missing, data[missing:][:100]))
                    missing -= len(piece)
                    answer.complete = missing == 0
                else:
                    piece = data
                total += len(piece)
                if total > ANSWER_BYTES_MAX:
                    raise WireError("the answer is longer than %d bytes" % ANSWER_BYTES_MAX)
                if piece:
                    yield time.monotonic() - self.sent_at, piece
            elif missing == 0:
                answer.complete = True
            if answer.complete:
                return
            came = self._read()
            if not came:
                # Without a length and not chunked, the end of the connection is the end.
                answer.complete = chunks is None and missing is None
                return

    def _read(self) -> bool:
        """One read appended to the buffer; False at the end of the connection."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise WireError("no complete answer within %g s" % self.timeout)
        self.socket.settimeout(left)
        try:
            data = self.socket.recv(65536)
        except socket.timeout as error:
            raise WireError("no complete answer within %g s; got so far %r" % (self.timeout, self.buffer[:300])) from error
        except ConnectionResetError:
            # As much an end as a close: what was complete before it stays complete.
            return False
        self.buffer += data
        return bool(data)


class Chunks:
    """Decoder of a chunked body, fed in any split."""

    def __init__(self) -> None:
        self.raw = b""
        self.left = 0
        self.state = "size"
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        self.raw += data
        out = b""
        while not self.ended:
            if self.state == "data":
                piece, self.raw = self.raw[: self.left], self.raw[self.left :]
                out += piece
                self.left -= len(piece)
                if self.left:
                    return out
                self.state = "data end"
            if b"\r\n" not in self.raw:
                return out
            line, self.raw = self.raw.split(b"\r\n", 1)
            if self.state == "data end":
                if line:
                    raise WireError("expected the end of a chunk, got %r" % line[:100])
                self.state = "size"
            elif self.state == "size":
                digits = line.split(b";")[0].strip()
                try:
                    self.left = int(digits, 16)
                except ValueError:
                    raise WireError("expected a chunk size, got %r" % line[:100]) from None
                self.state = "data" if self.left else "trailers"
            elif not line:
                self.ended = True
        if self.raw:
            raise WireError("%d bytes after the last chunk: %r" % (len(self.raw), self.raw[:100]))
        return out


def call(base: str, method: str, path: str, body: Any = None, headers: Dict[str, str] = {}, timeout: float = 120.0) -> Answer:
    """One request, its whole answer."""
    return Call(base, method, path, body, headers, timeout).answer()


def fetch(base: str, path: str, timeout: float = 10.0) -> Any:
    """The JSON at `path`; anything but a 200 is an error."""
    answer = call(base, "GET", path, timeout=timeout)
    if answer.status != 200:
        raise WireError("GET %s%s: expected 200, got %s" % (base, path, answer))
    return answer.json()


# What differs between two answers to the same question: names, clocks, measurements.
VOLATILE = ("id", "item_id", "response_id", "created", "created_at", "completed_at", "timings", "call_id")


def steady(value: Any) -> Any:
    """`value` with what differs from call to call blanked out, for comparing two answers."""
    if isinstance(value, dict):
        return {key: "…" if key in VOLATILE else steady(item) for key, item in value.items()}
    return [steady(item) for item in value] if isinstance(value, list) else value


def first_difference(ours: Any, theirs: Any, path: str = "$") -> Optional[str]:
    """Where two JSON values part, as text; None when they are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return "%s has the keys %s instead of %s" % (path, list(ours), list(theirs))
        pairs = [("%s.%s" % (path, key), ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return "%s has %d items instead of %d" % (path, len(ours), len(theirs))
        pairs = [("%s[%d]" % (path, index), *pair) for index, pair in enumerate(zip(ours, theirs))]
    else:
        return None if ours == theirs and type(ours) is type(theirs) else "%s is %r instead of %r" % (path, ours, theirs)
    return next(filter(None, (first_difference(one, other, where) for where, one, other in pairs)), None)
