"""/v1/embeddings, through the official client."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, serving
from openai import OpenAI


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("embeddings"), ApiEngine()) as address:
        yield address


def test_texts_and_tokens_have_vectors_of_length_one_in_their_order(server: str) -> None:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        # The client asks for base64 where nobody says otherwise.
        packed = client.embeddings.create(model=MODEL, input=["abc", "b"])
        plain = client.embeddings.create(model=MODEL, input=["abc", "b"], encoding_format="float")
        tokens = client.embeddings.create(model=MODEL, input=[[9, 8, 7]], encoding_format="float")
    assert (plain.model, plain.object, plain.usage.prompt_tokens, plain.usage.total_tokens) == (MODEL, "list", 5, 5)
    for index, (one, other) in enumerate(zip(packed.data, plain.data, strict=True)):
        assert one.index == other.index == index
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*other.embedding) == pytest.approx(1)
    assert plain.data[0].embedding[0] / plain.data[0].embedding[1] == pytest.approx(3 / 256)
    assert tokens.data[0].embedding[1] / tokens.data[0].embedding[0] == pytest.approx(3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 7}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate": True}, "truncate"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(server: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{server}/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404 if param == "model" else 400, param)
