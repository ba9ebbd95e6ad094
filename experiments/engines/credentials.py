"""Keys and certificates for a deployment on this machine, made anew for every run."""

import datetime
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

LIFE = datetime.timedelta(days=1)


@dataclass(frozen=True)
class ServerFiles:
    """PEM files: who to trust, and what a server on loopback shows."""

    authority: Path
    certificate: Path
    key: Path

    def options(self) -> list[str]:
        """As Flower's servers take them."""
        names = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
        files = (self.authority, self.certificate, self.key)
        return [part for name, file in zip(names, files, strict=True) for part in (name, str(file))]


def make_server_files(folder: Path) -> ServerFiles:
    """An authority, whose key is forgotten, and its certificate for 127.0.0.1 and localhost."""
    signer, key = _key(), _key()
    authority = _certificate("fedmuon demo authority", signer, signer, None)
    server = _certificate("localhost", key, signer, authority)
    files = ServerFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(Encoding.PEM))
    _write_secret(files.key, _private(key, PrivateFormat.PKCS8))
    return files


def make_node_key(file: Path) -> Path:
    """A SuperNode's private key, and the public one beside it (.pub): P-384, OpenSSH's format."""
    key = _key()
    _write_secret(file, _private(key, PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    Path(f"{file}.pub").write_bytes(public)
    return file


def make_secret(file: Path) -> Path:
    """256 random bits in hexadecimal digits."""
    _write_secret(file, secrets.token_hex(32).encode())
    return file


def store_control_key(file: Path, address: str, key: Path) -> None:
    """Let `flwr` show the key to the SuperLink at the address, as if it had logged in there."""
    from flwr.cli.auth_plugin.oidc_cli_plugin import OidcCliPlugin
    from flwr.supercore.auth.typing import AccountAuthCredentials
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    plugin = OidcCliPlugin(address)
    plugin.store = FileCredentialStore(file)
    plugin.store_tokens(AccountAuthCredentials(key.read_text(encoding="ascii"), "none"))


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write_secret(file: Path, content: bytes) -> None:
    file.touch(mode=0o600)
    file.write_bytes(content)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
) -> x509.Certificate:
    """A certificate for `key`; without an authority it signs itself and may sign others."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, signs = datetime.datetime.now(datetime.UTC), authority is None
    uses = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFE)
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), True)
        .add_extension(uses, True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(signed_by, False)
    )
    if authority:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        places = x509.SubjectAlternativeName([x509.DNSName("localhost"), address])
        builder = builder.add_extension(places, False)
    return builder.sign(signer, hashes.SHA384())
