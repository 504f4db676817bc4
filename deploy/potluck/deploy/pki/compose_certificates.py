"""Makes the certificates of the federation in `docker-compose.yml`.

A container that runs only once calls it with `python -m`. Each party's certificates go into its own
volume, so no party can read another's key, and only this container can read the authority's key.
Existing certificates stay; missing ones are made.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from potluck.common.net.identity import Role
from potluck.common.net.key_files import KEY_MODE, write_file
from potluck.common.process.command_line import exit_code_of
from potluck.deploy.pki import authority as pki

FEDERATION = "compose"
HOSTS = {"host-0": "client-0:7", "host-1": "client-8:15", "host-2": "client-16:23"}
COORDINATOR_NAMES = ("coordinator", "localhost", "127.0.0.1")


def make_certificates(folder: Path) -> list[str]:
    """Make the missing certificates in the parties' folders below `folder`.

    Return the parties that received new ones. Raises the errors of `pki.issue`, and StorageError if
    a file can't be written; the next call then makes what is missing.
    """
    authority = folder / "authority"
    if not (authority / "authority.key").exists():
        pki.create_authority(authority, FEDERATION)
    made = []
    for party, role in {
        "coordinator": Role.COORDINATOR,
        "operator": Role.OPERATOR,
        **dict.fromkeys(HOSTS, Role.HOST),
    }.items():
        if not (folder / party / "key.pem").exists():
            _hand_over(authority, folder / party, role)
            made.append(party)
    _make_password(folder / "grafana" / "admin-password")
    return made


def _hand_over(authority: Path, volume: Path, role: Role) -> None:
    party = volume.name
    issued = pki.issue(
        authority,
        role,
        party,
        clients=[HOSTS[party]] if role is Role.HOST else (),
        hosts=COORDINATOR_NAMES if role is Role.COORDINATOR else (),
        force=True,
    )
    for name, source in (
        ("authority.pem", issued.authority),
        ("certificate.pem", issued.certificate),
        ("key.pem", issued.key),  # written last: if it exists, all files exist
    ):
        write_file(volume / name, source.read_bytes(), KEY_MODE)
    issued.key.unlink()


def _make_password(path: Path) -> None:
    """Make Grafana's password, in a file readable by all: Grafana runs as another user."""
    if not path.exists():
        write_file(path, secrets.token_urlsafe(24).encode(), 0o444)
        path.parent.chmod(0o755)


def main() -> None:
    """Make missing certificates in /pki and print the parties that received one."""
    for party in make_certificates(Path("/pki")):
        print(f"created the certificate of {party}", flush=True)  # noqa: T201  # its only output


if __name__ == "__main__":
    sys.exit(exit_code_of(main, program="potluck.deploy.pki.compose_certificates"))
