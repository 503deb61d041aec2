"""The chat page: Gradio lays it out and brings the controls; one gr.HTML draws the conversation.

The drawing is done by the files under static/ (see static/js/main.js), fed by the server's native API
and event streams. Nothing is loaded from elsewhere.
"""

import asyncio
import warnings
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from localpaged.server.app import Page
from localpaged.ui.controls import controls

STATIC = Path(__file__).parent / "static"

HEAD = """
<script src="/static/localpaged/js/preferences.js"></script>
<link rel="icon" href="/static/localpaged/favicon.svg">
<link rel="stylesheet" href="/static/localpaged/css/frame.css">
<link rel="stylesheet" href="/static/localpaged/css/list.css">
<link rel="stylesheet" href="/static/localpaged/css/dialog.css">
<link rel="stylesheet" href="/static/localpaged/css/chat.css">
<link rel="stylesheet" href="/static/localpaged/css/side.css">
<link rel="modulepreload" href="/static/localpaged/js/main.js">
"""
BODY = (
    '<div id="lp-boot"><i>localpaged</i><b></b><u></u>'
    '<p>Opening the chat…</p><p lang="ja">チャットを開いています…</p></div>'
)

MOUNT_CHAT = "import('/static/localpaged/js/main.js').then((page) => page.mountChat(element, trigger));"
MOUNT_KV = "import('/static/localpaged/js/main.js').then((page) => page.mountKv(element));"


def page() -> Page:
    """What localpaged.server.app.create_app needs to serve the chat page at /."""
    return Page(static_folder=STATIC, head=HEAD, body=BODY, mount=mount)


def mount(app: FastAPI) -> None:
    """Put Gradio's application at / of another one."""
    # Where no event loop runs Gradio makes two of its own and forgets them.
    asyncio.run(_mount(app))


async def _mount(app: FastAPI) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gradio as gr

        theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
        with gr.Blocks(title="localpaged", analytics_enabled=False, fill_width=True) as blocks:
            chat = gr.HTML("", elem_id="lp-chat", js_on_load=MOUNT_CHAT, apply_default_css=False, container=False)
            with gr.Column(elem_id="lp-side"), gr.Tabs():
                with gr.Tab("Parameters"):
                    controls(chat)
                with gr.Tab("KV memory"):
                    gr.HTML("", elem_id="lp-kv", js_on_load=MOUNT_KV, apply_default_css=False)
        gr.mount_gradio_app(
            app,
            blocks,
            "/",
            theme=theme,
            footer_links=[],
            run_history=False,
            show_error=False,
            ssr_mode=False,
            enable_monitoring=False,
            mcp_server=False,
            pwa=False,
        )
    gradio_mount = app.router.routes[-1]
    assert isinstance(gradio_mount, Mount)
    gradio_mount.app = OnlyThePage(gradio_mount.app)


class OnlyThePage:
    """Gradio's application without its API: files to upload, events, proxies. The page uses none of it."""

    PREFIXES = ("/assets/", "/static/")
    PATHS = ("/", "", "/theme.css", "/manifest.json", "/favicon.ico")

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        wanted = path in self.PATHS or path.startswith(self.PREFIXES)
        if scope["type"] == "http" and not (wanted and scope["method"] in ("GET", "HEAD")):
            await PlainTextResponse("Not found", 404)(scope, receive, send)
            return
        await self.app(scope, receive, send)
