"""Conversations on the real server with the default model: what is computed again, and what is not, across restarts."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent / "e2e"))
from server_process import ServerProcess, real  # noqa: E402

pytestmark = pytest.mark.slow
LONG = "The lamp turns once in twelve seconds, and the keeper writes down every ship that passes. " * 30


class Chat:
    """One conversation, asked through the API that the page uses."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.id = self.call("POST", "/api/conversations", {})["conversation"]["id"]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, self.server.url + path, json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def view(self) -> Any:
        return self.call("GET", f"/api/conversations/{self.id}")

    def ask(self, text: str, n: int = 1, max_tokens: int = 12) -> list[Any]:
        """Ask after what is shown, wait, choose the first answer; all answers."""
        turns = self.view()["turns"]
        parent = turns[-1]["message"]["id"] if turns else None
        sampling = {"n": n, "max_tokens": max_tokens, "temperature": 0.8}
        body = {"parent": parent, "text": text, "sampling": sampling}
        job = self.call("POST", f"/api/conversations/{self.id}/messages", body)
        return self.answers(job["job"], n)

    def answers(self, job: str, n: int) -> list[Any]:
        with httpx.stream("GET", f"{self.server.url}/api/jobs/{job}/events", timeout=120) as events:
            for line in events.iter_lines():
                if '"type":"done"' in line:
                    break
        shown = self.view()
        answers = shown["open_candidates"] or [shown["turns"][-1]["message"]]
        assert len(answers) == n
        if n > 1:
            self.call("POST", f"/api/messages/{answers[0]['id']}/choose", {})
        return list(answers)

    def num_history(self) -> int:
        parent = self.view()["turns"][-1]["message"]["id"]
        return int(self.call("POST", "/api/count", {"conversation": self.id, "parent": parent})["history"])

    def residency(self) -> Any:
        found = self.call("GET", "/api/kv/conversations")["conversations"]
        return next((one for one in found if one["conversation"] == str(self.id)), None)

    def wait_until_stored(self) -> None:
        for _ in range(200):
            one = self.residency()
            # The beginning of the prompt, which all conversations share, is another's file.
            if one and one["num_disk_tokens"] + 64 > one["num_tokens"]:
                return
            time.sleep(0.05)
        raise AssertionError("it was never written")


def cached(answer: Any) -> int:
    return int(answer["timings"]["num_cached_tokens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = real(tmp_path_factory.mktemp("sessions"), share_cache=False).start()
    yield process
    process.stop()


def test_turns_compute_only_what_is_new_also_after_restarts(server: ServerProcess) -> None:
    chat = Chat(server)
    chat.ask(LONG + "How long does a turn take?", n=3)
    history = chat.num_history()
    assert history > 500
    (answer,) = chat.ask("And two turns?")
    assert cached(answer) == history - 1  # all but the last token that was drawn
    for how in (signal.SIGTERM, signal.SIGKILL):
        history = chat.num_history()
        chat.wait_until_stored()
        server.stop(how)
        server.start()
        assert chat.residency()["tier"] == "disk"
        (answer,) = chat.ask("And then?")
        assert cached(answer) == history - 1
    assert chat.residency()["tier"] == "host"


def test_regenerating_and_branches_reuse_what_they_share(server: ServerProcess) -> None:
    chat = Chat(server)
    chat.ask("Who writes? " + LONG, n=2)
    user = chat.view()["turns"][0]["message"]["id"]
    job = chat.call("POST", f"/api/messages/{user}/regenerate", {"sampling": {"n": 2, "max_tokens": 8}})
    for answer in chat.answers(job["job"], 4)[2:]:
        assert cached(answer) > 500
        assert answer["timings"]["num_computed_tokens"] == 1


def test_an_answer_that_was_cut_off_goes_on_from_its_last_token(server: ServerProcess) -> None:
    chat = Chat(server)
    (answer,) = chat.ask("Tell me about lighthouses.", max_tokens=10)
    assert answer["finish_reason"] == "length"
    history = chat.num_history()
    job = chat.call("POST", f"/api/messages/{answer['id']}/continue", {"sampling": {"max_tokens": 6}})
    (more,) = chat.answers(job["job"], 1)
    assert more["id"] == answer["id"] and more["text"].startswith(answer["text"])
    assert more["timings"]["num_tokens"] > answer["timings"]["num_tokens"]
    assert cached(more) == history - 1
    assert len(chat.view()["turns"]) == 2


def test_forgetting_a_conversation_frees_blocks_and_files(server: ServerProcess) -> None:
    chat = Chat(server)
    chat.ask("What is written? " + LONG)
    chat.wait_until_stored()
    before = chat.call("GET", "/api/kv")
    chat.call("POST", f"/api/kv/conversations/{chat.id}/pin", {"pinned": True})
    assert chat.residency()["pinned"]
    out = subprocess.run(
        [sys.executable, "-m", "localpaged", "ps", "--port", str(server.port)], capture_output=True, text=True
    )
    (line,) = [line for line in out.stdout.splitlines() if "(pinned)" in line]
    assert re.search(r"host +\d+ +\d+ +\d+ +[\d.]+ MB +[\d.]+ MB +\d+ s  What is written", line)
    assert chat.call("GET", "/api/kv")["conversations"][0]["conversation"] == str(chat.id)
    other = Chat(server)
    other.ask("And what is not?")
    other.wait_until_stored()
    chat.call("DELETE", f"/api/kv/conversations/{chat.id}")
    after = chat.call("GET", "/api/kv")
    assert chat.residency() is None
    assert after["leased"] < before["leased"]
    assert after["disk_bytes"] < before["disk_bytes"]
    assert after["consistent"]


def test_deleting_a_branch_frees_it(server: ServerProcess) -> None:
    chat = Chat(server)
    chat.ask("Name a bird.", n=3)
    leases = chat.call("GET", "/api/kv")["leases"]
    answers = chat.view()["turns"][-1]["siblings"]
    chat.call("POST", "/api/messages/delete", {"ids": answers[1:]})
    assert chat.call("GET", "/api/kv")["leases"] == leases - 2


def test_the_price_is_about_what_a_turn_takes(server: ServerProcess) -> None:
    """Within a factor of two, at one of five tries: other work on the machine may spoil some."""
    ratios = []
    for _ in range(5):
        chat = Chat(server)
        price = chat.call("GET", f"/api/kv/estimate?conversation={chat.id}&tokens=580&n=2&max_tokens=40")
        assert price["fits"] and price["num_cached_tokens"] <= 16
        start = time.perf_counter()
        answers = chat.ask(f"{chat.id}: tell me a very long story about this. " + LONG, n=2, max_tokens=40)
        elapsed = time.perf_counter() - start
        assert answers[0]["timings"]["num_computed_tokens"] > 500
        ratios.append(price["total_s"] / elapsed)
        if 0.5 < ratios[-1] < 2:
            return
    raise AssertionError(f"predicted over measured: {ratios}")


def test_a_second_server_on_the_same_folder_is_refused(server: ServerProcess) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "localpaged", "serve", "--port", "0"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LOCALPAGED_HOME": str(server.folder)},
        timeout=120,
    )
    assert out.returncode == 2
    assert f"port {server.port}" in out.stderr and "LOCALPAGED_HOME" in out.stderr
