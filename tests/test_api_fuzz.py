"""Every route of the OpenAPI document under requests that schemathesis makes up: no 5xx, errors in their shape."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from api_server import ApiEngine, serving
from hypothesis import HealthCheck, Phase, given, settings

from localpaged.server.error_response import ANTHROPIC_PATHS, OLLAMA_PATHS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("fuzz"), ApiEngine()) as address:
        yield address


@pytest.mark.slow
def test_nothing_that_can_be_sent_is_a_5xx(server: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 40
    seen: dict[str, set[int]] = {}
    for operation in operations:

        @settings(
            max_examples=15,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        )
        @given(case=operation.as_strategy())
        def send(case: Any) -> None:
            response = case.call(timeout=20)
            seen.setdefault(f"{case.method} {case.path}", set()).add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                error = response.json()["error"]
                if case.path in OLLAMA_PATHS:
                    assert isinstance(error, str)
                else:
                    assert error["message"] and ("code" in error or case.path in ANTHROPIC_PATHS)

        send()
    # What is made up is not refused throughout.
    assert sum(any(status < 400 for status in statuses) for statuses in seen.values()) >= 20, seen
