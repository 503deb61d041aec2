"""A real server process on the scripted engine, for looking at the page: python tests/serve_fake.py PORT FOLDER.

Environment: FAKE_TOKEN_S (pace), FAKE_LOAD_S, FAKE_LOAD_ERROR, FAKE_API_KEY, FAKE_STOP_TIMEOUT_S,
FAKE_PAGE (0: the API alone, which starts sooner).
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from api_server import PlainTokenizer
from fakes import FakeEngine

from localpaged.errors import ModelError
from localpaged.server import openai_api
from localpaged.server.access import Access
from localpaged.server.app import AppSettings, Page, create_app
from localpaged.server.graceful_server import GracefulServer
from localpaged.server.serve import listen
from localpaged.store.store import Store

ANSWERS = [
    "**The Lamp Room.** It names the one room where people naturally lower their voices, and it promises light"
    " rather than history.\n\n- quiet\n- easy to say\n- fits on a sign",
    "**Stillwater Light.** Calm water is what a keeper hopes to see, and the word “still” does the hushing for"
    " you. It also leaves room for the sea.\n\n| name | tone |\n|---|---|\n| Stillwater | calm |\n| Beacon | loud |",
    "**Between Beams.** The dark interval of a revolving light is when you notice the sea; the museum lives in"
    " that pause.\n\n```python\ndef flash(on=0.4, dark=4.6):\n    # the pause is the point\n    return on + dark\n```",
    "**Keeper’s Hour.** One hour is as long as anyone stays at the top, and the hour before closing is the"
    " quietest of all; naming it invites people to come late and stay a while. It costs $5, or $8 for two.",
]


HOSTILE = """Before <script>window.hacked = 1</script> after.

<img src="https://example.org/spy.png" onerror="window.hacked = 2">
![spy](https://example.org/spy2.png)
[click](javascript:window.hacked=3) and [fine](https://example.org/page)

<iframe src="https://example.org"></iframe><svg onload="window.hacked = 4"></svg>
<a href="data:text/html,<script>window.hacked=5</script>">data</a>

```html"><img src=x onerror="window.hacked=6">
<b onclick="window.hacked = 7">code</b>
```
It costs $5, or $8 for two."""
WIDE = (
    "# A heading\n\n" + "unbreakable" * 60 + "\n\n"
    "| " + " | ".join(f"column number {number}" for number in range(12)) + " |\n" + "|---" * 12 + "|\n"
    "| " + " | ".join("a cell with words" for _ in range(12)) + " |\n\n"
    "```python\nvalue = '" + "x" * 400 + "'\n```\n\n"
    "שלום עולם, זה טקסט מימין לשמאל עם English בתוכו.\n\n"
    "1. one\n   - nested " + "https://example.org/" + "path/" * 60 + "\n2. two\n\n> quoted " + "q" * 300
)
SPECIAL = {"hostile": HOSTILE, "wide": WIDE, "slow": "A slow answer goes on and on. " * 200, "empty": ""}


def answer(prompt: str, index: int) -> str:
    asked = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    return next((text for word, text in SPECIAL.items() if word in asked), ANSWERS[index % 4])


def make_page() -> Page | None:
    if os.environ.get("FAKE_PAGE") == "0":
        return None
    from localpaged.ui.page import page

    return page()


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    engine = FakeEngine(
        answer,
        token_s=float(os.environ.get("FAKE_TOKEN_S", "0.02")),
        load_s=float(os.environ.get("FAKE_LOAD_S", "0")),
        load_error=os.environ.get("FAKE_LOAD_ERROR"),
        chars_per_token=4,
        tokenizer=PlainTokenizer(),
    )
    settings = AppSettings(Access(api_key=os.environ.get("FAKE_API_KEY")), is_default_model=True, data_folder=folder)
    routers = [openai_api.router(engine, PlainTokenizer)]  # type: ignore[arg-type]
    app = create_app(engine, Store(folder / "chats.db"), PlainTokenizer, settings, make_page(), routers)

    async def announce() -> None:
        # The page is to tell what an engine that cannot start says; the real server ends then.
        with contextlib.suppress(ModelError):
            await engine.wait_ready()

    # uvicorn raises the signal again when it has stopped, as the product expects.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = GracefulServer(app, announce, float(os.environ.get("FAKE_STOP_TIMEOUT_S", "1")))
    server.run(sockets=[listen("127.0.0.1", port)])


if __name__ == "__main__":
    main()
