"""Which web pages and under which names the server is reached.

A browser on this machine, or in its network, sends what any web page tells it to. Two headers give such a request away.
`Origin` names the page's server: another one's is refused unless --allowed-origins has it. `Host` names who was asked:
a page whose name resolves to this machine's address (DNS rebinding) has its own name there, and nothing else differs.
No name in the world's DNS is taken for ours unless it is known to be, so such pages are refused. With an API key the
Host may be anything, as the page does not have the key; on a unix socket too, as no browser gets there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from urllib.parse import urlsplit

import tornado.httputil

from ..api_error import ApiError
from ..config import ServerConfig

# Load balancers and kubelets ask under any name; the answers tell a page nothing of worth.
PROBES = ("/health", "/v1/health", "/ready", "/ping")
UNTRACED = (*PROBES, "/metrics")  # asked all the time, by programs that want no trace of it
PRIVATE = (".local", ".internal")  # names that no public DNS server has (RFC 6762; ICANN, 2024)


class Access:
    def __init__(self, config: ServerConfig):
        self.origins = [origin.lower().rstrip("/") for origin in config.allowed_origins]
        self._checks_host = not config.api_keys and "*" not in config.allowed_hosts
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in config.allowed_hosts)}
        if self._checks_host:  # may ask the DNS, which may take its time
            bound = urlsplit(config.url).hostname or ""
            threading.Thread(target=self._add_known_names, args=(bound,), name="names", daemon=True).start()

    def check(self, request: tornado.httputil.HTTPServerRequest, address: object) -> None:
        """Raises ApiError 403. `address` is the one that the client reached: a tuple, or a unix socket's path."""
        if (
            self._checks_host
            and isinstance(address, tuple)
            and request.path not in PROBES
            and not self._is_ours(request.host_name, address[0])
        ):
            raise ApiError(
                403,
                f"the Host {request.host[:100]!r} is no name of this server: start it with "
                f"--allowed-hosts {request.host_name[:100]} if it is one",
                code="host_not_allowed",
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() != "null" and _server(origin) == _server(f"http://{request.host}"):
            return
        if origin is not None and self.allowed(origin) is None:
            raise ApiError(
                403,
                f"web pages of {origin[:100]} may not call this server: start it with "
                f"--allowed-origins {origin[:100]} to let them",
                code="origin_not_allowed",
            )

    def allowed(self, origin: str) -> str | None:
        """The value of Access-Control-Allow-Origin for a page."""
        if "*" in self.origins:
            return "*"
        return origin if origin.lower() in self.origins else None

    def _is_ours(self, name: str, address: str) -> bool:
        name = name.lower().strip("[]").rstrip(".")
        try:
            ipaddress.ip_address(name)
            return True  # nobody else's DNS has turned it into our address
        except ValueError:
            pass
        if not name or name in self._names or name.endswith(".localhost"):
            return True
        if any(name.endswith(known[1:]) for known in self._names if known.startswith("*.")):
            return True
        # Other machines' names for this one: of a node's second network, of a container.
        here = ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback
        return not here and ("." not in name or name.endswith(PRIVATE))

    def _add_known_names(self, bound: str) -> None:
        """The host's full name, and the names of the address that the server listens on."""
        found = [socket.getfqdn()]
        with contextlib.suppress(OSError):  # the address may have no name
            name, aliases, _ = socket.gethostbyaddr(bound)
            found += [name, *aliases]
        # A name with * in it would let in more than itself.
        self._names = self._names | {name.lower().rstrip(".") for name in found if name and "*" not in name}


def _server(origin: str) -> str:
    """Host and port; a proxy in between may have another scheme, and may name the usual port."""
    server = origin.lower().partition("://")[2]
    return server.removesuffix(":443").removesuffix(":80")
