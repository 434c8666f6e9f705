"""A proxy in front of a member's `admin.http`, as operators have them: behind any prefix it passes on what it is asked.
It can ask for a token, answer questions for JSON itself, end and come back. It counts what it sends, by prefix."""

import collections
import http.client
import http.server
import json
import threading
from urllib.parse import parse_qs, urlsplit


class Wrong(Exception):
    """A query that a member would refuse."""


class Front:
    def __init__(self, address, member, answers=None, token=None):
        """`answers` has functions of a query by their paths; None passes a question on, and False has no such path."""
        self.address, self.member = address, member
        self.answers, self.token = answers or {}, token
        self.bytes_sent, self.requests = collections.Counter(), collections.Counter()
        self.tokens = set()
        self.changed = threading.Condition()
        self.server = None
        self.start()

    def url(self, prefix, path):
        host, port = self.address
        return f"http://{host}:{port}/{prefix}/{path}"

    def start(self):
        front = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                front.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(self.address, Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=[0.05], daemon=True).start()

    def end(self):
        if self.server:
            self.server.shutdown()
            self.server.server_close()
        self.server = None

    def answer(self, asked):
        prefix, _, rest = asked.path.removeprefix("/").partition("/")
        path, query = urlsplit(f"/{rest}").path, parse_qs(urlsplit(asked.path).query)
        status, fields, body = self.answer_to(asked, path, query, f"/{rest}")
        head = f"HTTP/1.0 {status} -\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields) + "\r\n"
        with self.changed:
            self.bytes_sent[prefix] += len(head) + len(body)
            self.requests[prefix] += 1
            self.changed.notify_all()
        try:
            asked.wfile.write(head.encode() + body)
        except OSError:
            pass  # The browser has gone on.

    def answer_to(self, asked, path, query, target):
        is_file = path.startswith("/ui") and path != "/ui/state"
        if self.token and not is_file:
            found = asked.headers["authorization"]
            self.tokens.add(found)
            if found != f"Bearer {self.token}":
                return 401, [("www-authenticate", "Bearer")], b""
        if path in self.answers and self.answers[path] is not None:
            told = self.answers[path]
            try:
                text = told and json.dumps(told({key: values[0] for key, values in query.items()}))
            except Wrong as wrong:
                return 400, [("content-type", "text/plain")], str(wrong).encode()
            return (200, [("content-type", "application/json")], text.encode()) if told else (404, [], b"")
        member = http.client.HTTPConnection(*self.member, timeout=10)
        try:
            member.request("GET", target)
            answer = member.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except OSError:
            return 502, [], b""
        finally:
            member.close()

    def wait_for_requests(self, prefix, count, patience_s=60):
        """Until so many more requests have come."""
        with self.changed:
            due = self.requests[prefix] + count
            if not self.changed.wait_for(lambda: self.requests[prefix] >= due, patience_s):
                raise TimeoutError(f"{prefix}: {count} more requests are waited for")
