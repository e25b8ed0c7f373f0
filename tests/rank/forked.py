"""A fork server's main program for tests: workers do as their first message says."""

import os
import sys
import time

from phalanx.rank import fork_server


def load(settings):
    if settings == b"broken":
        raise ValueError("these settings are broken")

    def work(sock, files):
        while data := sock.recv(100):
            if data == b"loop":
                time.sleep(600)
            elif data == b"crash":
                os.abort()
            elif data == b"print":
                print("x" * 50, "\x1b[1m", file=sys.stderr)
            sock.send(settings)

    return work


if __name__ == "__main__":
    fork_server.serve(load)
