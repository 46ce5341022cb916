"""A server, and for the TLS tests a certificate authority and certificates, made by the openssl program."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rpc import services


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: an authority, a server and a client it has signed, and a stranger."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def server_context(self, ask_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path("server.crt"), self.path("server.key"))
        if ask_client:
            context.load_verify_locations(self.path("ca.crt"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self, name: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.crt"))
        if name is not None:
            context.load_cert_chain(self.path(f"{name}.crt"), self.path(f"{name}.key"))
        return context


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=90)


def _key(folder: Path, name: str) -> None:
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")


def _authority(folder: Path, name: str) -> None:
    _key(folder, name)
    _openssl(folder, "req", "-x509", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-days", "2",
             "-addext", "keyUsage=critical,keyCertSign", "-out", f"{name}.crt")  # fmt: skip


def _signed(folder: Path, name: str, authority: str) -> None:
    _key(folder, name)
    (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl(folder, "req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key",
             "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    _authority(folder, "ca")
    _authority(folder, "other")
    _signed(folder, "server", "ca")
    _signed(folder, "client", "ca")
    _signed(folder, "stranger", "other")
    return Certificates(folder)


@pytest.fixture
@asynccontextmanager
async def echo() -> AsyncIterator[services.EchoServer]:
    async with services.echo_server() as echo:
        yield echo
