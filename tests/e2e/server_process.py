"""Servers in processes of their own, as people run them, for the browser to talk to."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

TESTS = Path(__file__).parent.parent
START_TIMEOUT_S = 180.0


class ServerProcess:
    """A server on a free port of this machine, with its data in a folder. command gets PORT and FOLDER."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._command = [part.replace("PORT", str(self.port)).replace("FOLDER", str(folder)) for part in command]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, until: int = 200) -> "ServerProcess":
        """Run it and wait until /health answers with this status."""
        # The code that these tests lie beside, wherever another checkout is installed.
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **self._environment}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == until:
                    return self
            except httpx.HTTPError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"The server did not start:\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait for that."""
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")


def scripted(folder: Path, **environment: str) -> ServerProcess:
    """The scripted engine: fast, and able to answer badly."""
    return ServerProcess(
        [sys.executable, str(TESTS / "serve_fake.py"), "PORT", "FOLDER"],
        folder,
        **{"FAKE_TOKEN_S": "0.008"} | environment,
    )


def real(folder: Path, *flags: str, share_cache: bool = True) -> ServerProcess:
    """The real server with the embedded model, as `localpaged serve` runs it, with its data in the folder.

    What it has read of the model's file is shared with the other tests, or read anew as at a person's first start.
    """
    if share_cache:
        shared = Path(os.environ["LOCALPAGED_HOME"]) / "cache"
        shared.mkdir(parents=True, exist_ok=True)
        (folder / "cache").symlink_to(shared)
    command = [sys.executable, "-m", "localpaged", "serve", "--port", "PORT", "--kv-cache-memory", "1G", *flags]
    return ServerProcess(command, folder, LOCALPAGED_HOME=str(folder))


def remote(folder: Path, url: str) -> ServerProcess:
    """Our server with another one's model."""
    command = [sys.executable, "-m", "localpaged", "serve", "--port", "PORT", "--engine", "openai", "--base-url", url]
    return ServerProcess(command, folder, LOCALPAGED_HOME=str(folder))
