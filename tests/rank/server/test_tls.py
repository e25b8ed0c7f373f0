"""Certificates that cannot be used are named, and a client that has one takes no other."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from phalanx.rank.server import tls

from ...certificates import make_certificate


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    return make_certificate(folder / "a"), make_certificate(folder / "b")


def test_what_cannot_be_used(pairs, tmp_path):
    (cert, key), (_, other) = pairs
    cases = [
        ((cert, other), f"{cert} and {other}: the key is another certificate's"),
        ((cert, ""), f"{cert}: no PEM of a certificate and its private key"),
        (("/nowhere", key), "/nowhere: No such file or directory"),
        ((key, key), f"{key} and {key}: no PEM of a certificate and its private key"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError) as refused:
            tls.server_context(*given)
        assert str(refused.value) == message
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    hidden = tmp_path / "hidden.pem"
    kind, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    hidden.write_bytes(loaded.private_bytes(kind, form, serialization.BestAvailableEncryption(b"word")))
    with pytest.raises(ValueError, match=f"{hidden}.*passphrase"):
        tls.server_context(cert, str(hidden))


@pytest.mark.parametrize("year", [2024, 2049, 2050, 2101])  # DER has two kinds of times: before 2050, and since
def test_when_a_certificate_ends(year):
    end = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    leaf = trustme.CA().issue_cert("localhost", not_before=datetime(2023, 1, 1, tzinfo=UTC), not_after=end)
    pem = leaf.cert_chain_pems[0].bytes().decode()
    assert x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc == end
    assert tls.expiry(pem) == end.timestamp()


def test_one_file_for_both(pairs, tmp_path):
    whole = tmp_path / "whole.pem"
    whole.write_bytes(b"".join(Path(path).read_bytes() for path in reversed(pairs[0])))
    tls.server_context(str(whole), "")
    assert tls.certificate(str(whole)) == tls.certificate(pairs[0][0])


def handshake(server, client):
    """Whether the client takes the server."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(back, there, server_hostname="10.0.0.1"),
        server.wrap_bio(there, back, server_side=True),
    )
    for _ in range(4):
        for one in ends:
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return True


def test_a_client_takes_that_certificate_alone(pairs):
    (cert, key), (other, other_key) = pairs
    client = tls.client_context(tls.certificate(cert))
    assert handshake(tls.server_context(cert, key), client)
    assert not handshake(tls.server_context(other, other_key), client)
    assert not handshake(tls.server_context(cert, key), tls.client_context(""))
