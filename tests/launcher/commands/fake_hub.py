"""A hub of one model on this machine: what huggingface_hub asks of the real one, and nothing else.

`/api/models/ID…` tells commit and files, `/ID/resolve/REVISION/FILE` gives one, also from the middle.
"""

import hashlib
import http.server
import json
import re
import threading

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`files` by name; `cut` breaks off so many files' first transfer in the middle; `seen` has the requests."""

    def __init__(self, files: dict[str, bytes]):
        self.id = "org/tiny"
        self.files = files
        self.cut: set[str] = set()
        self.status = 0  # given: every answer
        self.error = ""  # the header by which the hub says what is wrong
        self.token = ""  # needed
        self.seen: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            def do_HEAD(self):
                hub.answer(self)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler):
        path = handler.path.partition("?")[0]
        self.seen.append(f"{handler.command} {path} {handler.headers.get('Range', '')}".strip())
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return self.reply(handler, 401, b"{}", {"X-Error-Code": "GatedRepo"})
        if self.status:
            return self.reply(handler, self.status, b"{}", {"X-Error-Code": self.error} if self.error else {})
        api = re.fullmatch(rf"/api/models/{self.id}(/revision/(?P<revision>[^/]+)|/tree/[^/]+)?", path)
        if api and api["revision"] not in (None, "main", COMMIT):
            return self.reply(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self.reply(handler, 200, json.dumps(self.tree() if "/tree/" in path else self.info()).encode())
        found = re.fullmatch(rf"/{self.id}/resolve/[^/]+/(.+)", path)
        if found is None or found[1] not in self.files:
            return self.reply(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound" if found else "RepoNotFound"})
        self.file(handler, found[1])

    def info(self):
        files = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        return {"id": self.id, "modelId": self.id, "sha": COMMIT, "siblings": files, "private": False, "tags": []}

    def tree(self):
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]

    def file(self, handler, name):
        data = self.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-\d*", handler.headers.get("Range", ""))
        part = data[int(start[1]) :] if start else data
        if start:
            headers["Content-Range"] = f"bytes {start[1]}-{len(data) - 1}/{len(data)}"
        self.reply(handler, 206 if start else 200, part, headers, cut=name in self.cut)
        if handler.command == "GET":
            self.cut.discard(name)

    def reply(self, handler, status, body, headers=None, cut=False):
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body[: len(body) // 2] if cut else body)
            handler.close_connection = cut
