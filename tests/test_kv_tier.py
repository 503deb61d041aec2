"""Conversations that go on after a restart, a kill, or having had to give way: from disk, with the same answers."""

import contextlib
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from byte_model import BYTES_PER_BLOCK, greedy, prompt

from localpaged import LLM, SamplingParams
from localpaged.engine.core import EngineCore
from localpaged.engine.messages import Delta, Finished, Generate

ANSWER = 13


def start(
    model: Path,
    kv: Path,
    num_blocks: int = 64,
    disk: int = 1 << 30,
    swap_space: float = 0,
    prefix_caching: bool = True,
) -> EngineCore:
    llm = LLM(
        str(model),
        block_size=8,
        dtype="float32",
        kv_cache_memory=num_blocks * BYTES_PER_BLOCK,
        kv_folder=str(kv),
        kv_disk_space=disk,
        swap_space=swap_space,
        enable_prefix_caching=prefix_caching,
        check_when_idle=True,
    )
    core = llm._engine.core
    assert core.sessions.tier is not None
    for store in core.sessions.tier.stores:
        store.read_bytes_s = 1e15  # Reading always pays, whatever this machine is busy with.
    return core


def turn(
    core: EngineCore, name: str, token_ids: list[int], conversation: str = "c", n: int = 1
) -> tuple[list[Any], int]:
    """One greedy turn that keeps its answers; the answers, and how many tokens were not computed."""
    command = Generate(
        request_id=name,
        prompt_token_ids=token_ids,
        params=SamplingParams(n=n, temperature=0, max_tokens=ANSWER, ignore_eos=True),
        conversation=conversation,
        lease_ids=[f"{name}-{index}" for index in range(n)],
    )
    assert not core.submit(command)
    answers: list[list[int]] = [[] for _ in range(n)]
    for _ in range(500):
        for event in core.step():
            if isinstance(event, Delta):
                answers[event.index] += event.token_ids
            if isinstance(event, Finished):
                return answers, event.num_cached_tokens
    raise AssertionError("it does not end")


def converse(core: EngineCore, conversation: str = "c", salt: int = 0) -> list[int]:
    """Two turns, the first with a choice among three; all tokens of the branch."""
    history: list[int] = prompt(45, salt)["prompt_token_ids"]
    answers, _ = turn(core, f"{conversation}1", history, conversation, n=3)
    core.sessions.choose(f"{conversation}1-1")
    history = history + answers[1] + [31, 32, 33]
    (answer,), _ = turn(core, f"{conversation}2", history, conversation)
    return history + answer


def after_a_restart(model: Path, kv: Path) -> tuple[EngineCore, list[int]]:
    """A second engine on what a conversation with the first one left on disk, and that conversation's tokens."""
    core = start(model, kv)
    history = converse(core)
    core.sessions.close()
    return start(model, kv), history


def test_after_a_restart_nothing_is_computed_again_and_the_answer_is_the_same(
    byte_model: Path,
    byte_reference: Any,
    tmp_path: Path,
) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    question = [*history, 41, 42]
    (answer,), cached = turn(core, "later", question)
    assert cached == len(history) - 1
    assert answer == greedy(byte_reference, question, ANSWER)


def test_opening_brings_it_in_before_the_message_comes(byte_model: Path, tmp_path: Path) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    core.sessions.warm("c", history)
    while core.has_work:
        core.step()
    assert core.leases.residency()[0].num_tokens == len(history) - 1
    assert turn(core, "later", [*history, 41])[1] == len(history) - 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_missing_or_damaged_file_is_computed_again(
    byte_model: Path,
    byte_reference: Any,
    tmp_path: Path,
    place: int,
) -> None:
    core = start(byte_model, tmp_path)
    history = converse(core)
    core.sessions.close()
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3  # the question, the chosen answer, the second turn
    content = bytearray(files[place].read_bytes())
    content[-1] ^= 255
    files[place].write_bytes(content)
    core = start(byte_model, tmp_path)
    question = [*history, 41, 42]
    (answer,), cached = turn(core, "later", question)
    assert cached < len(history) - 1
    assert answer == greedy(byte_reference, question, ANSWER)


@pytest.mark.parametrize(("disk", "swap_space"), [(1 << 30, 0), (0, 1), (1 << 30, 0.0002)])
def test_what_had_to_give_way_comes_back(
    byte_model: Path, byte_reference: Any, tmp_path: Path, disk: int, swap_space: float
) -> None:
    """Six conversations in a pool that holds two; below it disk, memory, or both with little memory."""
    core = start(byte_model, tmp_path, 30, disk, swap_space)
    histories = {name: converse(core, name, salt) for salt, name in enumerate("abcdef")}
    assert core.leases.num_given_up > 0
    for name, history in histories.items():
        question = [*history, 41, 42]
        (answer,), cached = turn(core, f"{name}3", question, name)
        assert cached == len(history) - 1, name
        assert answer == greedy(byte_reference, question, ANSWER)


@pytest.mark.parametrize(("disk", "swap_space"), [(1 << 30, 0), (0, 1)])
def test_answers_that_were_not_chosen_move_down_too(
    byte_model: Path, tmp_path: Path, disk: int, swap_space: float
) -> None:
    core = start(byte_model, tmp_path, 30, disk, swap_space)
    history = prompt(45, 7)["prompt_token_ids"]
    command = Generate(
        request_id="r",
        prompt_token_ids=history,
        params=SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=ANSWER, ignore_eos=True),
        conversation="c",
        lease_ids=["r-0", "r-1"],
    )
    assert not core.submit(command)
    while core.has_work:
        core.step()
    core.sessions.choose("r-0")
    branches = [list(lease.token_ids) for lease in core.leases]
    assert branches[0] != branches[1]
    for salt in range(4):
        converse(core, f"other{salt}", 10 + salt)
    assert not [lease for lease in core.leases if lease.conversation == "c"]
    assert core.sessions.tier is not None
    core.sessions.tier.flush_writes()
    for place, branch in enumerate(branches):
        assert turn(core, f"again{place}", [*branch, 41], "c")[1] == len(branch) - 1
    # What the two have in common is there once.
    spans = [span for store in core.sessions.tier.stores for span in store.spans() if span.conversation == "c"]
    assert sum(span.token_ids[:8] == history[:8] for span in spans) == 1


def test_cancelling_while_it_is_read_leaves_nothing_behind(byte_model: Path, tmp_path: Path) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    command = Generate(
        request_id="r",
        prompt_token_ids=[*history, 1],
        params=SamplingParams(max_tokens=5),
        conversation="c",
        lease_ids=["r-0"],
    )
    assert not core.submit(command)
    core.cancel("r")
    while core.has_work:
        core.step()
    core.sessions.drop("c")
    core.check()
    assert core.pool.num_referenced == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_cancelling_one_answer_while_it_is_read_lets_the_others_go_on(byte_model: Path, tmp_path: Path) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    command = Generate(
        request_id="r",
        prompt_token_ids=[*history, 1],
        params=SamplingParams(n=2, max_tokens=5, ignore_eos=True),
        conversation="c",
        lease_ids=["r-0", "r-1"],
    )
    assert not core.submit(command)
    core.cancel("r", 0)
    events = [event for _ in range(300) if core.has_work for event in core.step()]
    assert isinstance(events[-1], Finished)
    assert events[-1].num_cached_tokens == len(history) - 1


def test_what_is_deleted_is_not_written_afterwards(byte_model: Path, tmp_path: Path) -> None:
    core = start(byte_model, tmp_path)
    assert core.sessions.tier is not None
    command = Generate(
        request_id="r",
        prompt_token_ids=prompt(45)["prompt_token_ids"],
        params=SamplingParams(max_tokens=50, ignore_eos=True),
        conversation="c",
        lease_ids=["r-0"],
    )
    assert not core.submit(command)
    for _ in range(4):
        core.step()
    # Kept by the cancel, forgotten before anything else is done.
    core.cancel("r")
    core.sessions.drop("c")
    turn(core, "other", prompt(45, 9)["prompt_token_ids"], "d")
    # And what waits to be written.
    free = threading.Event()
    core.sessions.tier._writer.submit(free.wait)
    converse(core, "e", 3)
    core.sessions.drop("e")
    free.set()
    core.sessions.close()
    core.sessions.tier._writer.shutdown(wait=True)
    assert {span.conversation for span in core.sessions.tier.disk.spans()} == {"d"}


def test_what_a_deleted_conversation_left_to_others_is_nobody_s(byte_model: Path, tmp_path: Path) -> None:
    core = start(byte_model, tmp_path)
    assert core.sessions.tier is not None
    system = prompt(16)["prompt_token_ids"]
    for conversation in "ab":
        turn(core, conversation, [*system, ord(conversation), 5, 6, 7], conversation)
        core.sessions.tier.flush_writes()
    core.sessions.drop("a")
    assert [one.conversation for one in core.sessions.residency()] == ["b"]
    assert core.sessions.tier_stats()["disk_bytes"] == sum(
        file.stat().st_size for file in tmp_path.rglob("*.safetensors")
    )


def test_deleting_an_answer_reaches_what_was_read_of_it(byte_model: Path, tmp_path: Path) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    core.sessions.warm("c", history)
    while core.has_work:
        core.step()
    core.sessions.drop(lease_ids=["c2-0"])
    assert core.pool.num_referenced == 0
    core.sessions.warm("c", history)
    core.sessions.drop(lease_ids=["c1-1"])  # while it is read
    while core.has_work:
        core.step()
    assert core.pool.num_referenced == 0
    assert not [lease for lease in core.leases]


def test_forgetting_while_it_is_read_forgets_it(byte_model: Path, tmp_path: Path) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    core.sessions.warm("c", history)
    core.sessions.drop("c")
    while core.has_work:
        core.step()
    assert core.pool.num_referenced == 0
    assert core.sessions.residency() == []


def test_what_cannot_be_read_is_computed(
    byte_model: Path, byte_reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, history = after_a_restart(byte_model, tmp_path)
    assert core.sessions.tier is not None

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(core.sessions.tier.disk, "read", fail)
    (answer,), cached = turn(core, "later", [*history, 41])
    assert cached == 0
    assert answer == greedy(byte_reference, [*history, 41], ANSWER)


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_conversations_are_answered_as_without_any_of_this(
    byte_model: Path, byte_reference: Any, tmp_path: Path, seed: int
) -> None:
    """Append, branch, edit, regenerate, choose, pin, prune, forget, evict, restart, with host memory, disk or both."""
    rng = random.Random(seed)
    disk, swap_space, prefix_caching = [
        (1 << 30, 0, True),
        (0, 1, True),
        (200_000, 0.0001, True),
        (1 << 30, 1, False),
    ][seed]
    core = start(byte_model, tmp_path, 24, disk, swap_space, prefix_caching)
    # Every text that was ever asked or answered, by conversation, and the leases of the answers.
    texts: dict[str, list[list[int]]] = {
        name: [prompt(20, salt)["prompt_token_ids"]] for salt, name in enumerate("abc")
    }
    names: list[str] = []
    num_reused = num_given_up = 0
    for number in range(40):
        conversation = rng.choice("abc")
        match rng.randrange(10):
            case 0:
                num_given_up += core.leases.num_given_up
                core.sessions.close()
                core = start(byte_model, tmp_path, 24, disk, swap_space, prefix_caching)
            case 1 if names:
                core.sessions.drop(lease_ids=[rng.choice(names)])
            case 2 if number % 3 == 0:
                core.sessions.drop(conversation)
            case 3 if names:
                core.sessions.choose(rng.choice(names))
            case 4:
                core.leases.pin(conversation, rng.random() < 0.5)
            case _:
                text = rng.choice(texts[conversation])
                if rng.random() < 0.3:
                    text = text[: rng.randint(1, len(text))]
                question = [*text, *(rng.randrange(3, 300) for _ in range(rng.randint(0, 9)))][:150]
                n = rng.choice([1, 1, 2, 3])
                answers, cached = turn(core, f"t{number}", question, conversation, n)
                expected = greedy(byte_reference, question, ANSWER)
                assert [answer[: len(expected)] for answer in answers] == [expected] * n  # to transformers' end
                num_reused += cached
                names += [f"t{number}-{index}" for index in range(n)]
                texts[conversation].append(question + answers[0])
        core.check()
    assert num_reused > 100
    assert num_given_up + core.leases.num_given_up > 0
    core.sessions.drop()
    assert core.pool.num_referenced == 0
    assert core.sessions.residency() == []


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_kv_tier import start, turn
core = start(Path(sys.argv[1]), Path(sys.argv[2]))
sys.stdin.readline()
history = [(i * 37) % 300 + 3 for i in range(30)]
for number in range(1000):
    (answer,), _ = turn(core, f"t{number}", history, "c")
    history = [*history, *answer, 5, 6]
    print(*history, flush=True)
    if len(history) > 440:
        break
"""


@pytest.mark.slow
def test_killed_while_it_writes_it_never_answers_wrongly(byte_model: Path, byte_reference: Any, tmp_path: Path) -> None:
    # They start at the same time, because that takes seconds, and each waits for its turn to write.
    folders = [tmp_path / str(attempt) for attempt in range(3)]
    with contextlib.ExitStack() as stack:
        processes = []
        for kv in folders:
            command = [sys.executable, "-c", KILLED, str(byte_model), str(kv), str(Path(__file__).parent)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        found = []
        for attempt, (kv, process) in enumerate(zip(folders, processes, strict=True)):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            lines = [process.stdout.readline() for _ in range(2 + 3 * attempt)]
            process.kill()
            process.wait()
            history = [int(word) for word in lines[-1].split()]
            core = start(byte_model, kv)
            (answer,), cached = turn(core, "after", history)
            found.append(cached)
            assert answer == greedy(byte_reference, history, ANSWER)
            core.check()
    assert max(found) > 0
