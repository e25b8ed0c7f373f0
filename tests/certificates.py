"""Certificates for TLS, made by an authority that nobody knows."""

from pathlib import Path

import trustme


def make_certificate(folder: Path, *names: str) -> tuple[str, str]:
    """Paths of a certificate of these names, with the authority's after it, and of its key."""
    made = trustme.CA().issue_cert(*names or ("localhost",))
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return str(cert), str(key)
