"""Stands for `python -m phalanx.rank.server`: answers /health, hears rank 0 come and go; FAKE_SERVER=exit:3 ends it.

With FAKE_SERVER=hangs it does not answer, with rude it answers what is no HTTP.
"""

import json
import os
import select
import signal
import socket
import sys
import time

from phalanx.rank.server.config import VARIABLE, ServerConfig, take

config = take(ServerConfig, VARIABLE, "serve")
place = os.environ["FAKE_DIR"]
with open(f"{place}/server", "a") as file:
    file.write(f"{os.getpid()}\n")
with open(f"{place}/server-environ", "w") as file:
    json.dump({**os.environ, "session": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0")}, file)
how = os.environ.get("FAKE_SERVER", "")
if how.startswith("exit:"):
    print("the server does not like this model", flush=True)
    sys.exit(int(how[5:]))


def note(text):
    with open(f"{place}/server-log", "a") as file:
        file.write(text + "\n")


def end(*_):
    note("term")
    print("the server says goodbye", flush=True)
    os._exit(0)


import ctypes  # noqa: E402

ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != config.parent_pid:
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda *_: note("usr1"))
http = socket.socket(fileno=config.listen_fd)
link = socket.socket(socket.AF_UNIX)
if config.registry_file:
    os.makedirs(os.path.dirname(config.registry_file), exist_ok=True)
    with open(config.registry_file, "w") as file:
        file.write("{}")
link.bind(config.link)
link.listen()
print("the server is up", file=sys.stderr, flush=True)
watched = [http, link]
ready = not how.startswith("loading")
while True:
    for sock in select.select(watched, [], [])[0]:
        if sock is http:
            client, _ = http.accept()
            if how == "hangs":
                watched.remove(http)
                continue
            client.recv(4096)
            if how == "rude":
                client.sendall(b"what?\r\n")
                client.close()
                continue
            status = "ready" if ready else "loading"
            body = json.dumps({"status": status}).encode()
            head = f"HTTP/1.0 {200 if ready else 503} x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.close()
        elif sock is link:
            watched.append(link.accept()[0])
            note("connected")
        elif not sock.recv(4096):
            watched.remove(sock)
            note("lost")
            if not config.restarts_expected:
                time.sleep(0.05)
                os._exit(70)
