"""The page where a browser gives the API key and gets a session cookie. No scripts in it."""

import asyncio
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from localpaged.server.access import COOKIE, Access

FAILURE_DELAY_S = 1.0
COOKIE_AGE_S = 30 * 24 * 3600

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Log in – localpaged</title>
<link rel="icon" href="/static/localpaged/favicon.svg">
<style>
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--line:#e4e0d9;--ink:#1f1d1a;--soft:#6b665e;
--accent:#2f6f5e;--warn:#a8431f}
@media (prefers-color-scheme:dark){:root{--bg:#171614;--card:#232220;--line:#35332f;--ink:#ece9e3;
--soft:#a8a299;--accent:#6dbfa4;--warn:#e59a76}}
*{box-sizing:border-box}body{margin:0;min-height:100vh;display:grid;place-items:center;background:var(--bg);
color:var(--ink);font:15px/1.55 system-ui,sans-serif}
form{width:min(360px,calc(100vw - 32px));background:var(--card);border:1px solid var(--line);
border-radius:14px;padding:26px}
h1{font-size:17px;margin:0 0 4px}p{margin:0 0 16px;color:var(--soft);font-size:13.5px}
label{font-size:13px;color:var(--soft)}.wrong{color:var(--warn)}
input{width:100%;font:inherit;color:inherit;background:var(--bg);border:1px solid var(--line);
border-radius:8px;padding:9px 11px;margin:4px 0 14px}
button{width:100%;font:inherit;font-weight:600;border:0;border-radius:8px;padding:9px;background:var(--accent);
color:var(--card);cursor:pointer}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
</style></head><body><form method="post" action="/login"><h1>localpaged</h1>{note}
<label for="key">API key</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Log in</button></form></body></html>"""


def router(access: Access) -> APIRouter:
    """The routes GET and POST /login, and POST /logout."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/login")
    async def login_page() -> HTMLResponse:
        return _page("<p>This server needs a key: yours, or the one that it was started with.</p>")

    @routes.post("/login")
    async def login(request: Request) -> Response:
        fields = parse_qs((await request.body()).decode(errors="replace"))
        user = access.user_with_key(fields.get("key", [""])[0]) if access.needs_key else ""
        if user is None:
            await asyncio.sleep(FAILURE_DELAY_S)
            return _page('<p class="wrong" role="alert">That is nobody’s key on this server.</p>', 401)
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(
            COOKIE,
            access.session(user) if access.needs_key else "",
            max_age=COOKIE_AGE_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    @routes.post("/logout")
    async def logout() -> Response:
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    return routes


def _page(note: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(PAGE.replace("{note}", note), status_code=status)
