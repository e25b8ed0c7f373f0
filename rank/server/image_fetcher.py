"""Fetches images from other hosts, with limits on size and time, and never from within the site.

A name that is allowed may lead to a private address, now or a moment later. So addresses are checked where they are
connected to, not before.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Any, NamedTuple

from tornado.httpclient import HTTPError, HTTPRequest
from tornado.netutil import DefaultLoopResolver, Resolver
from tornado.simple_httpclient import HTTPStreamClosedError, HTTPTimeoutError, SimpleAsyncHTTPClient

from .api_error import bad
from .version import version

SECONDS = 20.0  # for a fetch
NAT64, UNICAST = (ipaddress.IPv6Network(network) for network in ("64:ff9b::/96", "2000::/3"))
# Clouds serve metadata to their hosts there; before Python 3.11.10 the first counts as public.
WITHIN = ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("168.63.129.16/32")
FOUND = 301, 302, 303, 307, 308


class Redirect(NamedTuple):
    url: str


class Refused(OSError):
    """An address that nobody may have fetched."""


class PublicResolver(Resolver):
    """Resolves names to public addresses alone, besides addresses that were allowed as they are."""

    def initialize(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._resolver = DefaultLoopResolver()

    async def resolve(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[tuple[int, Any]]:
        found = await self._resolver.resolve(host, port, family)
        for _, address in found:
            if host not in self._allowed and not is_public(address[0]):
                raise Refused(f"{host} is {address[0]}, which is no public address")
        return found


def is_public(address: str) -> bool:
    """Whether an address is one that anybody on the internet reaches: not those that stand for IPv4 ones within."""
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, ipaddress.IPv6Address):
        inner = one.ipv4_mapped or one.sixtofour or (one.teredo[1] if one.teredo else None)
        if one in NAT64:
            inner = ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if one not in UNICAST:  # is_global knows neither fec0::/10 nor the older ways to write IPv4 addresses
            return False
    return one.is_global and not one.is_multicast and not any(one in network for network in WITHIN)


class ImageFetcher:
    """Asks one host at a time; whoever calls it follows redirects."""

    def __init__(self, addresses: Collection[str], largest: int):
        """addresses: that may be asked as they are, public or not. largest: bytes of an answer."""
        resolver = PublicResolver(allowed=addresses)
        self._client = SimpleAsyncHTTPClient(
            force_instance=True, resolver=resolver, max_body_size=largest, max_clients=32
        )

    async def get(self, url: str, at: str) -> bytes | Redirect:
        """The bytes behind a URL, or where it redirects. at: its field, for errors. Raises ApiError 400."""
        request = HTTPRequest(
            url, follow_redirects=False, connect_timeout=SECONDS / 4, request_timeout=SECONDS,
            decompress_response=False, headers={"User-Agent": f"phalanx/{version()}", "Accept": "image/*"},
        )  # fmt: skip
        try:
            response = await self._client.fetch(request, raise_error=False)
        except HTTPTimeoutError:
            raise bad(at, f"{at}: the URL's host does not answer within {SECONDS:g} s") from None
        except Refused as error:
            raise bad(at, f"{at} must not be fetched: {error}") from None
        except (HTTPError, HTTPStreamClosedError, OSError, ValueError) as error:
            raise bad(at, f"{at} cannot be fetched: {str(error)[:200] or type(error).__name__}") from None
        if response.code == 200:
            return response.body
        if response.code in FOUND and (url := response.headers.get("Location", "")):
            return Redirect(url)
        raise bad(at, f"{at}: the URL's host answers {response.code}")

    def close(self) -> None:
        self._client.close()
