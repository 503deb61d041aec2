"""JSON that nothing here can keep is refused on its way in, whatever field it is in."""

from collections.abc import Iterator

import httpx
import pytest
from api_server import MODEL, ApiEngine, serving

from localpaged.server.sound_json import unsound


@pytest.mark.parametrize("body", [rb'"\ud83d"', rb'{"a":["x\uDE00"]}', b"NaN", b"[-Infinity]", b"1e999", b"-1E+400"])
def test_halves_of_characters_and_numbers_without_end_are_told(body: bytes) -> None:
    assert unsound(body) is not None


@pytest.mark.parametrize(
    "body",
    [
        rb'"\ud83d\ude00"',
        rb'"\\ud83d"',
        b'"NaN and Infinity, 1e999"',
        b"{NaN",
        b"1e100",
        b"",
        b"\xff\xfe",
        b"[" * 100_000 + b"NaN",
        b"9" * 400,
    ],
)
def test_what_is_sound_or_no_json_at_all_passes(body: bytes) -> None:
    assert unsound(body) is None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("sound"), ApiEngine()) as address:
        yield address


BIG = "1" + "0" * 30
SAY = f'"model":"{MODEL}","messages":[{{"role":"user","content":"x"}}]'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/conversations", r'{"settings":{"a":"\ud800x"}}'),
        ("/api/conversations", '{"settings":{"a":1e999}}'),
        ("/v1/chat/completions", f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"\\ud800"}}]}}'),
        ("/v1/chat/completions", f'{{{SAY},"temperature":NaN}}'),
        ("/v1/chat/completions", f'{{{SAY},"seed":{BIG}}}'),
        ("/v1/chat/completions", f'{{{SAY},"max_tokens":{BIG}}}'),
        ("/v1/chat/completions", f'{{{SAY},"stop_token_ids":[{BIG}]}}'),
        ("/v1/chat/completions", f'{{{SAY},"logit_bias":{{"{BIG}":1}}}}'),
        ("/v1/messages", f'{{{SAY},"max_tokens":{BIG}}}'),
        ("/api/chat", f'{{{SAY},"options":{{"num_predict":{BIG}}}}}'),
        ("/v1/responses", f'{{"model":"{MODEL}","input":"\\udfff"}}'),
        ("/v1/embeddings", f'{{"input":[{BIG}]}}'),
        ("/v1/completions", f'{{"prompt":[{BIG}]}}'),
        ("/v1/completions", '{"prompt":[-1]}'),
    ],
)
def test_it_is_a_400_on_every_path_and_nothing_is_broken(server: str, path: str, body: str) -> None:
    answer = httpx.post(f"{server}{path}", content=body.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert httpx.get(f"{server}/api/conversations").status_code == 200
