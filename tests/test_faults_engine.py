"""A step that fails, wherever in it: its requests end with a clear error, every block comes back, others go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import BLOCK_SIZE, BYTES_PER_BLOCK, prompt

from localpaged import LLM, SamplingParams
from localpaged.engine.detokenizer import Detokenizer
from localpaged.engine.messages import Event, Failed, Finished, Generate


@pytest.fixture(scope="module")
def llm(byte_model: Path) -> LLM:
    """Four sequences at once: what comes later waits."""
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "dtype": "float32", "max_num_seqs": 4}
    return LLM(str(byte_model), kv_cache_memory=64 * BYTES_PER_BLOCK, **settings)


def submit(llm: LLM, name: str, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=6, ignore_eos=True)
    assert not llm._engine.core.submit(Generate(request_id=name, params=params, **prompt(20, len(name))))


@pytest.mark.parametrize("error", [RuntimeError("poisoned"), MemoryError(), torch.OutOfMemoryError("CUDA: no room")])
@pytest.mark.parametrize("where", ["forward", "logits", "launch", "push"])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_the_requests_of_a_failing_step_end_and_those_that_wait_are_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str, steps_before: int
) -> None:
    core = llm._engine.core
    core.pool.forget_cached()
    for name, n in (("first", 3), ("second", 1), ("waiting", 4)):
        submit(llm, name, n)
    for _ in range(steps_before):
        core.step()

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    owner: Any = {"forward": core.runner, "logits": core.runner, "launch": core.sampler, "push": Detokenizer}[where]
    with monkeypatch.context() as patched:
        patched.setattr(owner, where, fail)
        failed = [event for event in core.step() if isinstance(event, Failed)]
    assert sorted(event.request_id for event in failed) == ["first", "second"]
    for event in failed:
        assert event.code == "engine_error"
        assert "failed on this request" in event.message and (str(error) or "MemoryError") in event.message
    assert core.pool.num_referenced == 0
    core.check()
    events: list[Event] = []
    while core.has_work:
        events += core.step()
        core.check()
    assert [event.request_id for event in events if isinstance(event, Finished)] == ["waiting"]
    assert not [event for event in events if isinstance(event, Failed)]
    assert core.pool.num_referenced == 0 and core.jobs == {}
