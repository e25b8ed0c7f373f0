"""TLS: the server's certificate, and how this user's clients know it again."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

END = "-----END CERTIFICATE-----\n"
# A certificate's validity in DER (RFC 5280, 4.1.2.5): two times of the tag UTCTime, or from the year 2050 on
# GeneralizedTime. Python's ssl gives these of a peer's certificate only.
VALIDITY = re.compile(rb"\x30.(?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)", re.DOTALL)


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """The TLS context of a PEM chain and its key; key "": the chain's file has it. Raises ValueError with a message for
    users."""
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


def expiry(certificate: str) -> float | None:
    """Unix time at which a PEM certificate ends, if that is written as it should be."""
    found = VALIDITY.search(ssl.PEM_cert_to_DER_cert(certificate))
    if found is None:
        return None
    short, full = found.groups()
    text = (full or (b"20" if short < b"50" else b"19") + short).decode()
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def client_context(certificate: str) -> ssl.SSLContext:
    """The TLS context of a client that trusts this very certificate, whoever has signed it. "": by the authorities."""
    if not certificate:
        return ssl.create_default_context()
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False  # the certificate is compared itself
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
