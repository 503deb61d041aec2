"""The page as the server gives it out: nothing from elsewhere, and no more of Gradio than it uses."""

import re
from collections.abc import Iterator

import pytest
from fakes import FakeEngine, FakeTokenizer
from starlette.testclient import TestClient

from localpaged.server.app import create_app
from localpaged.store.store import Store
from localpaged.ui.page import STATIC, page

REMOTE = re.compile(r"""(?:src|href)=["'](?:https?:)?//|@import|url\(["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    store = Store(tmp_path_factory.mktemp("page") / "chats.db")
    with TestClient(create_app(FakeEngine(), store, FakeTokenizer, page=page()), "http://127.0.0.1") as client:
        yield client


def test_the_page_names_nothing_on_other_machines(client: TestClient) -> None:
    text = client.get("/", headers={"accept": "text/html"}).text
    assert 'src="/static/localpaged/js/preferences.js"' in text and "og:image" not in text
    assert not REMOTE.search(text)
    assert '"analytics_enabled":false' in text.replace(" ", "")


@pytest.mark.parametrize("path", sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*.*")))
def test_every_file_of_the_page_is_served_and_loads_nothing_from_elsewhere(client: TestClient, path: str) -> None:
    answer = client.get(f"/static/localpaged/{path}")
    assert answer.status_code == 200
    if not path.startswith("vendor/"):
        assert not REMOTE.search(answer.text)
        assert answer.text.count("\n") <= 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/info"),
        ("POST", "/gradio_api/queue/join"),
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/gradio_api/proxy=https://example.org/"),
        ("GET", "/config"),
        ("POST", "/"),
    ],
)
def test_the_api_of_gradio_is_closed(client: TestClient, method: str, path: str) -> None:
    assert client.request(method, path).status_code in (404, 405)


def test_every_vendored_library_has_its_licence() -> None:
    folder = STATIC / "vendor"
    names = {path.name.split(".")[0] for path in folder.glob("*.js")}
    assert names == {"marked", "purify", "highlight"}
    for name in ("marked", "dompurify", "highlight"):
        assert len((folder / f"{name}.LICENSE.txt").read_text()) > 500
