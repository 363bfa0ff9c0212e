"""A real S3 server on loopback, for the tests: versitygw over a directory of the caller.

The binary comes by scripts/versitygw into build/, once. An object is a file `<directory>/<bucket>/<name>`, so a test can see
and damage it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

HOST = "127.0.0.1"
USER = "tester"
PATIENCE_S = 30.0
BUILD = Path(__file__).parents[2] / "build" / "versitygw"


class Gateway:
    """A server that a test starts and ends. Leaving the block stops it; it dies with the thread that started it."""

    def __init__(self, directory: Path, secret: str | None = None) -> None:
        self.directory = directory.absolute()
        self.secret = secret or secrets.token_hex(16)
        self.address = f"{HOST}:{_free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Gateway:
        found = sorted(BUILD.glob("*/versitygw"))
        assert found, "the S3 server is missing: scripts/versitygw builds it"
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", found[-1], "--port", self.address, "posix", self.directory],
                env=os.environ | {"ROOT_ACCESS_KEY": USER, "ROOT_SECRET_KEY": self.secret},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        limit = time.monotonic() + PATIENCE_S
        while not self._listens():
            assert self._process.poll() is None, f"the S3 server ended while it started:\n{self._log.read_text()}"
            assert time.monotonic() < limit, f"the S3 server does not come up:\n{self._log.read_text()}"
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def bucket(self) -> str:
        """A new bucket."""
        name = f"bucket-{secrets.token_hex(6)}"
        (self.directory / name).mkdir()
        return name

    def options(self, address: str | None = None) -> dict[str, str]:
        """The storage options of a client that reaches this server, or what is at `address` and passes on to it."""
        return {
            "access_key_id": USER,
            "secret_access_key": self.secret,
            "endpoint": f"http://{address or self.address}",
            "region": "us-east-1",
        }

    @property
    def _log(self) -> Path:
        return self.directory.with_suffix(".log")

    def _listens(self) -> bool:
        host, port = self.address.split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
