"""Start a real vLLM, put `localpaged serve --engine openai` in front of it, and ask it through every door.

    check_remote_vllm.py VLLM MODEL [-- FLAG ...]

VLLM: the vllm command of an environment of its own. MODEL: a model's folder. Flags behind -- are vLLM's, such as
--dtype float32. Prints what was checked and measured as one JSON object; ends with 1 when anything was not as it
should be.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

VLLM_START_S = 600
START_S = 60
ANSWER_S = 300
QUESTION = [{"role": "user", "content": "Tell me about the sea in a few sentences."}]
# vLLM's answer to whether it still computes.
RUNNING = "vllm:num_requests_running"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group, ended with all that it started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | environment, start_new_session=True
        )
    try:
        yield process
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, how)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> float:
    """Seconds until /health answers 200."""
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return round(time.monotonic() - begin, 2)
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    sys.exit(f"{address} did not come up:\n{log.read_text(errors='replace')[-3000:]}")


class Checks:
    """What was looked at: what is as it should be, and what was measured."""

    def __init__(self, vllm: str, ours: str, model: str) -> None:
        self.vllm = vllm
        self.ours = ours
        self.model = model
        self.http = httpx.Client(base_url=ours, timeout=ANSWER_S)
        self.report: dict[str, Any] = {"passed": [], "failed": []}

    def check(self, name: str, good: object) -> None:
        self.report["passed" if good else "failed"].append(name)

    def num_running(self) -> float:
        lines = httpx.get(f"{self.vllm}/metrics", timeout=10).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RUNNING))

    def becomes_busy(self, within_s: float) -> bool:
        """Whether vLLM says that it computes; its gauge lags behind its answers."""
        begin = time.monotonic()
        while time.monotonic() - begin < within_s:
            if self.num_running():
                return True
            time.sleep(0.05)
        return False

    def becomes_idle(self, within_s: float) -> float | None:
        """Seconds until vLLM computes nothing any more; None when it goes on."""
        begin = time.monotonic()
        while time.monotonic() - begin < within_s:
            if not self.num_running():
                return round(time.monotonic() - begin, 2)
            time.sleep(0.05)
        return None

    def whole_answers(self) -> None:
        body = {"messages": QUESTION, "n": 4, "max_tokens": 32, "seed": 7, "temperature": 0.8}
        answer = self.http.post("/v1/chat/completions", json=body).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        self.check("n=4: four answers that differ", len(set(texts)) == 4)
        again = self.http.post("/v1/chat/completions", json=body).json()
        self.check("the same seed: the same answers", texts == [c["message"]["content"] for c in again["choices"]])
        self.check("usage of four answers", 4 < answer["usage"]["completion_tokens"] <= 4 * 32)
        self.report["usage"] = answer["usage"]

    def cached_prompt(self) -> None:
        messages = [{"role": "user", "content": "The sea is wide and the boat is small. " * 40 + "What is small?"}]
        body = {"messages": messages, "max_tokens": 4}
        usages = [self.http.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
        self.check("cached tokens come through", usages[1]["prompt_tokens_details"]["cached_tokens"] > 0)
        self.report["usage_of_a_prompt_asked_again"] = usages[1]

    def stream(self, n: int) -> None:
        body = {
            "messages": QUESTION,
            "n": n,
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, first, texts, usage = time.monotonic(), 0.0, [""] * n, {}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text = choice["delta"].get("content") or ""
                    first = first or (time.monotonic() - begin if text else 0.0)
                    texts[choice["index"]] += text
        total = time.monotonic() - begin
        self.check(f"n={n}: every answer is streamed", all(texts))
        rate = (usage["completion_tokens"] - n) / (total - first)
        self.report[f"stream_n{n}"] = {
            "first_s": round(first, 3),
            "total_s": round(total, 3),
            "tokens": usage["completion_tokens"],
            "tokens_per_s": round(rate, 1),
        }

    def same_text_as_vllm(self) -> None:
        body = {"model": self.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
        theirs = httpx.post(f"{self.vllm}/v1/chat/completions", json=body, timeout=ANSWER_S).json()
        ours = self.http.post("/v1/chat/completions", json=body).json()
        text = theirs["choices"][0]["message"]["content"]
        self.check("greedy: vLLM's own answer", ours["choices"][0]["message"]["content"] == text)

    def refusal(self) -> None:
        body = {"messages": QUESTION, "max_tokens": 10**6}
        answer = self.http.post("/v1/chat/completions", json=body)
        self.check("too long: 400, once", answer.status_code == 400)
        self.report["refusal"] = answer.json()["error"]["message"]

    def leaving(self) -> None:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 1500, "ignore_eos": True, "n": 2}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            # Kept: an iterator that is thrown away closes the connection.
            lines = response.iter_lines()
            next(lines)
            self.check("before leaving it computes", self.becomes_busy(10))
            next(lines)
        idle_s = self.becomes_idle(10)
        self.check("a client that leaves ends the work at vLLM", idle_s is not None)
        self.report["idle_after_leaving_s"] = idle_s

    def page(self) -> None:
        """What the chat page does: ask for four, choose, go on, stop, continue."""
        conversation = self.http.post("/api/conversations", json={}).json()["conversation"]["id"]
        sampling = {"n": 4, "max_tokens": 32, "seed": 3}
        self.ask(conversation, "Three names for a boat?", None, sampling)
        answers = self.view(conversation)["open_candidates"]
        self.check("page: four complete answers", [one["state"] for one in answers] == ["complete"] * 4)
        timings = [one["timings"] for one in answers]
        self.check("page: tokens of each answer", all(one["num_tokens"] for one in timings))
        self.report["page_timings"] = timings[0]
        self.http.post(f"/api/messages/{answers[1]['id']}/choose", json={})
        self.ask(conversation, "Go on.", answers[1]["id"], {"n": 1, "max_tokens": 16, "seed": 3})
        last = self.view(conversation)["turns"][-1]["message"]
        self.check("page: a second turn", last["state"] == "complete" and last["text"])
        self.report["second_turn"] = last["timings"]
        before = last["text"]
        if last["finish_reason"] == "length":
            again = {"sampling": {"max_tokens": 16, "seed": 3}}
            job = self.http.post(f"/api/messages/{last['id']}/continue", json=again).json()
            self.events(job["job"])
            whole = self.view(conversation)["turns"][-1]["message"]
            # The model may find that nothing more is to be said.
            goes_on = len(whole["text"]) > len(before) or whole["finish_reason"] == "stop"
            good = whole["state"] == "complete" and whole["text"].startswith(before) and goes_on
            self.check("page: an answer that was cut off goes on", good)
            self.report["continued"] = {"before": before, **{k: whole[k] for k in ("text", "finish_reason", "error")}}
        body = {"parent": last["id"], "text": "Tell me everything.", "sampling": {"n": 3, "max_tokens": 1024}}
        job = self.http.post(f"/api/conversations/{conversation}/messages", json=body).json()
        while not all(one["text"] for one in self.view(conversation)["open_candidates"]):
            time.sleep(0.1)
        self.check("page: before stopping it computes", self.becomes_busy(10))
        self.http.post(f"/api/jobs/{job['job']}/stop", json={})
        self.events(job["job"])
        stopped = self.view(conversation)["open_candidates"]
        self.check("page: stopping keeps the text", all(one["text"] for one in stopped))
        self.check("page: stopping ends the work at vLLM", self.becomes_idle(10) is not None)

    def ask(self, conversation: int, text: str, parent: int | None, sampling: dict[str, Any]) -> None:
        body = {"parent": parent, "text": text, "sampling": sampling}
        self.events(self.http.post(f"/api/conversations/{conversation}/messages", json=body).json()["job"])

    def events(self, job: str) -> None:
        """Follow a job to its end."""
        with self.http.stream("GET", f"/api/jobs/{job}/events") as response:
            for _ in response.iter_lines():
                pass

    def view(self, conversation: int) -> dict[str, Any]:
        return dict(self.http.get(f"/api/conversations/{conversation}").json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of vLLM, behind --")
    options = parser.parse_args()
    # The module, not the command: builds under another name of the package have no command that works.
    python = options.vllm.parent / "python"
    vllm_port, port = free_port(), free_port()
    vllm, ours, name = f"http://127.0.0.1:{vllm_port}", f"http://127.0.0.1:{port}", "checked"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model), "--host"]
    command += ["127.0.0.1", "--port", str(vllm_port), "--served-model-name", name, "--enable-prompt-tokens-details"]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
        with running([*command, *options.flags], home / "vllm.log", **quiet) as theirs:
            vllm_start_s = wait_for(vllm, theirs, home / "vllm.log", VLLM_START_S)
            serve = [sys.executable, "-m", "localpaged", "serve", "--engine", "openai", "--base-url", vllm]
            serve += ["--port", str(port)]
            with running(serve, home / "serve.log", LOCALPAGED_HOME=folder) as process:
                start_s = wait_for(ours, process, home / "serve.log", START_S)
                checks = Checks(vllm, ours, name)
                checks.report |= {"vllm_start_s": vllm_start_s, "start_s": start_s}
                checks.whole_answers()
                checks.cached_prompt()
                checks.stream(1)
                checks.stream(4)
                checks.same_text_as_vllm()
                checks.refusal()
                checks.leaving()
                checks.page()
                checks.report["state"] = checks.http.get("/api/state").json()
    print(json.dumps(checks.report, indent=2, ensure_ascii=False))
    sys.exit(bool(checks.report["failed"]))


if __name__ == "__main__":
    main()
