"""SCRAM: the vectors of the RFCs, and servers that do not know the password."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from dualwrite.kafka.client.authentication import ScramError, scram
from fixtures.tables import table

# RFC 7677, 3
NONCE = "rOprNGfwEbeRWgbNEkqO"
BOTH = NONCE + "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FIRST_256 = f"r={BOTH},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
PROOF_256 = f"c=biws,r={BOTH},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
FINAL_256 = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def server_final(mechanism: str, password: str, nonce: str, first: str, server_first: str) -> str:
    """The server's signature, written independently of the client's code (RFC 5802, 3)."""
    name = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
    parts = dict(part.split("=", 1) for part in server_first.split(","))
    salted = hashlib.pbkdf2_hmac(name, password.encode(), base64.b64decode(parts["s"]), int(parts["i"]))
    server_key = hmac.new(salted, b"Server Key", name).digest()
    signed = f"{first},{server_first},c=biws,r={parts['r']}".encode()
    return f"v={base64.b64encode(hmac.new(server_key, signed, name).digest()).decode()}"


def test_the_vector_of_the_rfc() -> None:
    messages = scram("SCRAM-SHA-256", "user", "pencil", NONCE)
    assert next(messages) == f"n,,n=user,r={NONCE}".encode()
    assert messages.send(FIRST_256.encode()) == PROOF_256.encode()
    with pytest.raises(StopIteration):
        messages.send(FINAL_256.encode())


@table("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_the_server_proves_that_it_knows_the_password(mechanism: str) -> None:
    """Name and password are not ASCII, and the name has the characters that SCRAM escapes."""
    for password, known in (("p=,äss", True), ("another", False)):
        messages = scram(mechanism, "a,b=ü", "p=,äss")
        first = next(messages).decode()
        assert first.startswith("n,,n=a=2Cb=3Dü,r=")
        nonce = first.rpartition("r=")[2]
        server_first = f"r={nonce}more,s={base64.b64encode(b'salt').decode()},i=4096"
        messages.send(server_first.encode())
        final = server_final(mechanism, password, nonce, first.removeprefix("n,,"), server_first)
        with pytest.raises(StopIteration if known else ScramError):
            messages.send(final.encode())


def test_no_two_logins_have_the_same_nonce() -> None:
    assert len({next(scram("SCRAM-SHA-512", "u", "p")) for _ in range(10)}) == 10


@table(
    ("server_first", "reason"),
    [
        ("r=other,s=c2FsdA==,i=4096", "nonce"),
        (f"r={NONCE},s=c2FsdA==,i=4096", "nonce"),  # nothing of the server's own
        (f"r={BOTH},s=c2FsdA==,i=4095", "iterations"),
        (f"r={BOTH},s=c2FsdA==,i=1000001", "iterations"),
        (f"r={BOTH},s=c2FsdA==,i=" + "9" * 5000, "iterations"),
        (f"r={BOTH},s=c2FsdA==,i=-1", "iterations"),
        (f"r={BOTH},s=c2FsdA==", "iterations"),
        (f"r={BOTH},i=4096", "'s'"),
        (f"r={BOTH},s=?,i=4096", "'s'"),
        (f"m=x,r={BOTH},s=c2FsdA==,i=4096", "extension"),
        ("", "nonce"),
    ],
)
def test_a_first_message_that_is_not_scram_is_refused(server_first: str, reason: str) -> None:
    messages = scram("SCRAM-SHA-256", "user", "pencil", NONCE)
    next(messages)
    with pytest.raises(ScramError, match=reason):
        messages.send(server_first.encode())


@table(
    ("final", "reason"),
    [
        (b"", "'v'"),
        (b"v=", "signature"),
        (b"v=" + base64.b64encode(bytes(32)), "signature"),
        (b"v=\xff", "UTF-8"),
        ("v=ä".encode(), "'v'"),
        (b"e=invalid-proof", "'invalid-proof'"),
    ],
)
def test_a_last_message_without_the_signature_is_refused(final: bytes, reason: str) -> None:
    messages = scram("SCRAM-SHA-256", "user", "pencil", NONCE)
    next(messages)
    messages.send(FIRST_256.encode())
    with pytest.raises(ScramError, match=reason):
        messages.send(final)
