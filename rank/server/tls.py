"""TLS: the server's certificate, and how this user's clients know it again."""

from __future__ import annotations

import ssl
from pathlib import Path

END = "-----END CERTIFICATE-----\n"


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Of the paths of a PEM chain and its key; key "": the chain's file has it. Raises ValueError in words."""
    for path in filter(None, (cert, key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def refuse() -> str:  # OpenSSL would ask the terminal
        raise ValueError(f"{key or cert}: the private key has a passphrase, which nobody could type here")

    try:
        context.load_cert_chain(cert, key or None, refuse)
    except ssl.SSLError as error:
        mixed = error.reason == "KEY_VALUES_MISMATCH"
        why = "the key is another certificate's" if mixed else "no PEM of a certificate and its private key"
        raise ValueError(f"{' and '.join(filter(None, (cert, key)))}: {why}") from None
    return context


def certificate(cert: str) -> str:
    """The server's own certificate, which is the chain's first. PEM."""
    text = Path(cert).read_text()
    return text[text.index("-----BEGIN CERTIFICATE") :].partition(END)[0] + END


def client_context(certificate: str) -> ssl.SSLContext:
    """Of a client that knows the server by this very certificate, whoever has signed it. "": by the authorities."""
    if not certificate:
        return ssl.create_default_context()
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False  # the certificate is compared itself
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
