"""The chat in the terminal, and what `localpaged ps` asks a running server."""

import contextlib
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from localpaged.config import Settings
from localpaged.engine.messages import Delta, Event
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import LocalpagedError
from localpaged.models.locate import locate_model

HELP = "Enter sends · Ctrl-C stops an answer · /new starts over · /exit or Ctrl-D ends"


class Answers:
    """The candidates of one turn as they grow, shown while they do."""

    def __init__(self, console: Console, count: int) -> None:
        self.console = console
        self.texts = [""] * count
        self.ended: list[str | None] = [None] * count
        self._live: Live | None = None

    def __enter__(self) -> "Answers":
        if len(self.texts) > 1 and self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=12)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()
        elif len(self.texts) > 1:
            for index, text in enumerate(self.texts):
                self.console.print(f"[{index + 1}] {text.strip()}", markup=False, highlight=False)
        else:
            self.console.print()

    def take(self, event: Event) -> None:
        """Show what an event adds."""
        if not isinstance(event, Delta):
            return
        self.texts[event.index] += event.text
        self.ended[event.index] = event.finish_reason or self.ended[event.index]
        if self._live is not None:
            self._live.update(self._render())
        elif len(self.texts) == 1:
            self.console.print(event.text, end="", markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Columns:
        # Two columns that fit the terminal; the newest lines are the ones to see.
        width = max((self.console.width - 1) // 2, 20)
        rows = max((self.console.height - 4) // ((len(self.texts) + 1) // 2) - 2, 3)
        panels = []
        for index, text in enumerate(self.texts):
            lines = Text(text).wrap(self.console, width - 4)
            state = self.ended[index] or "…"
            body = Text("\n").join(lines[-rows:])
            panels.append(Panel(body, title=f"{index + 1}", subtitle=state, width=width))
        return Columns(panels, padding=0)


def chat(settings: Settings, params: SamplingParams, prompt: str | None, system: str | None, json_output: bool) -> None:
    """Answer one prompt, or chat until the person ends it."""
    console = Console(stderr=False, soft_wrap=True)
    status = Console(stderr=True)
    model = locate_model(settings.model)
    with status.status(f"Loading {model.name} …") if status.is_terminal else contextlib.nullcontext():
        from localpaged.engine.llm import LLM

        config = settings.engine_config(model.path, model.name)
        llm = LLM(str(model.path), **{f: getattr(config, f) for f in config.__struct_fields__ if f != "model"})
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if json_output and prompt is None:
        prompt = sys.stdin.read()
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
        if json_output:
            out = llm.chat(messages, params)[0]
            print(json.dumps([{"text": c.text, "finish_reason": c.finish_reason} for c in out.outputs]))
        else:
            _ask(llm, console, messages, params)
        return
    console.print(f"{model.name}. {HELP}", style="dim")
    start = list(messages)
    while True:
        try:
            text = console.input("\n[bold]› [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            messages = list(start)
            console.print("A new conversation.", style="dim")
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            texts = _ask(llm, console, messages, params)
        except LocalpagedError as error:
            messages.pop()
            console.print(str(error), style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": _choose(console, texts)})


def _ask(llm: Any, console: Console, messages: list[dict[str, Any]], params: SamplingParams) -> list[str]:
    """The candidates' texts; after Ctrl-C what they had."""
    with Answers(console, params.n) as answers:
        try:
            llm.chat(messages, params, on_event=answers.take)
        except KeyboardInterrupt:
            answers.ended = [reason or "stopped" for reason in answers.ended]
    return answers.texts


def _choose(console: Console, texts: list[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    while True:
        try:
            given = console.input(f"Go on with which, 1 to {len(texts)}? (1) ").strip() or "1"
        except (EOFError, KeyboardInterrupt):
            return texts[0]
        if given.isdigit() and 1 <= int(given) <= len(texts):
            return texts[int(given) - 1]
        console.print(f"{given!r} is not a number from 1 to {len(texts)}.", markup=False)


def fetch_status(settings: Settings) -> dict[str, Any]:
    """A running server's health and pool. Raises LocalpagedError when none answers."""
    address = f"http://{settings.host}:{settings.port}"
    key = settings.key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        health = _get(f"{address}/health", headers)
        return {"address": address, **health, **_kv(address, headers)}
    except urllib.error.HTTPError as error:
        raise LocalpagedError(f"The server at {address} says: {_said(error)}.") from error
    except (urllib.error.URLError, ValueError) as error:
        raise LocalpagedError(f"No localpaged server answers at {address}. Start one: localpaged serve.") from error


def _kv(address: str, headers: dict[str, str]) -> dict[str, Any]:
    """The pool; none where the model runs on yet another server."""
    try:
        return _get(f"{address}/api/kv", headers)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return {"kv": _said(error), "conversations": []}


def _said(error: urllib.error.HTTPError) -> str:
    """What an answer that is an error says, in whatever form."""
    try:
        body = json.loads(error.read())
    except ValueError:
        return f"{error.reason}; its log says why"
    return str(body.get("status") or body.get("error", {}).get("message") or error.reason)


def _get(url: str, headers: dict[str, str]) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        value: dict[str, Any] = json.loads(answer.read())
        return value
