"""Spans on disk and in memory: what is found, shared, dropped, what becomes of damaged files."""

import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localpaged.engine.kv_files import KvFiles
from localpaged.engine.kv_host import KvHost
from localpaged.engine.kv_spans import Found, KvReadError, SpanStore

BLOCK = 4


def kv_of(token_ids: list[int], start: int = 0) -> np.ndarray:
    """Blocks in which each slot holds its token; [blocks, 1, 2, 1, BLOCK, 1]."""
    own = token_ids[start:]
    padded = own + [-1] * (-len(own) % BLOCK)
    slots = np.asarray(padded, dtype=np.float32).reshape(-1, 1, 1, 1, BLOCK, 1)
    return np.ascontiguousarray(np.repeat(slots, 2, axis=2))


def store(files: SpanStore, token_ids: list[int], conversation: str = "c", lease: str = "l") -> None:
    stored = files.num_stored(token_ids)
    if stored < len(token_ids):
        assert files.write(kv_of(token_ids, stored), token_ids, stored, conversation, lease)


def read(files: SpanStore, found: Found) -> list[int]:
    slots = [part.store.read(part.span, part.first, part.end)[:, 0, 0, 0, :, 0].ravel() for part in found.parts]
    return np.concatenate(slots)[: found.num_tokens].astype(int).tolist() if slots else []


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let every larger file of this process fail as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_files(folder: Path, most: int = 1 << 30, fingerprint: str = "model") -> KvFiles:
    return KvFiles(folder, fingerprint, BLOCK, most)


def test_what_was_written_is_found_to_the_token_by_the_next_process(tmp_path: Path) -> None:
    text = list(range(50, 64))
    store(open_files(tmp_path), text)
    files = open_files(tmp_path)
    found = files.find([*text, 1, 2])
    assert found.num_tokens == 14
    assert read(files, found) == text
    assert files.find(text[:10]).num_tokens == 8
    assert files.find([1, *text]).num_tokens == 0


def test_branches_store_what_they_share_once(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    prompt = list(range(40))
    store(files, prompt)
    alone = files.num_bytes
    for answer in range(4):
        store(files, [*prompt, *(100 * answer + i for i in range(1, 9))])
    assert len(files.spans()) == 5
    assert files.num_bytes - alone < 4 * alone
    for answer in range(4):
        text = [*prompt, *(100 * answer + i for i in range(1, 9))]
        assert read(files, files.find(text)) == text


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_file_is_dropped_and_what_follows_it_too(tmp_path: Path, damage: str) -> None:
    files = open_files(tmp_path)
    text = list(range(24))
    store(files, text[:8])
    store(files, text[:16])
    store(files, text)
    path = files.path_of(files.find(text).parts[1].span)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 1
    new = {"cut": content[:-8], "flip": content, "empty": b"", "foreign": b"not KV at all"}[damage]
    path.write_bytes(new)
    if damage == "flip":
        found = files.find(text)
        with pytest.raises(KvReadError, match="checksum"):
            read(files, found)
    else:
        files = open_files(tmp_path)
    assert not path.exists()
    assert read(files, files.find(text)) == text[:8]


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    (files.folder / "ab.1234").write_bytes(b"half")
    open_files(tmp_path)
    assert list(files.folder.iterdir()) == []


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    store(open_files(tmp_path), list(range(16)))
    assert open_files(tmp_path, fingerprint="other").find(list(range(16))).num_tokens == 0


def test_spans_that_were_written_before_another_was_there_are_found_all_the_same(tmp_path: Path) -> None:
    """Two turns at once: both begin at the root, and a third goes on from the shorter one."""
    files = open_files(tmp_path)
    text = list(range(26))
    for end in (10, 22, 10, 22):
        assert files.write(kv_of(text[:end]), text[:end], 0, "c", "l")
    assert len(files.spans()) == 2
    assert files.write(kv_of(text, 20), text, 20, "c", "l")
    assert read(files, files.find(text)) == text
    files.drop([files.find(text[:10]).parts[-1].span])
    assert read(files, files.find(text)) == text


def test_of_two_spans_with_the_same_blocks_the_other_is_found_when_one_goes(tmp_path: Path) -> None:
    for first, second in ((10, 22), (22, 10)):
        files = open_files(tmp_path / str(first))
        text = list(range(30))
        for end in (first, second):
            assert files.write(kv_of(text[:end]), text[:end], 0, "c", str(end))
        assert files.write(kv_of(text[:12], 8), text[:12], 8, "c", "child")
        files.drop_leases(["22"])
        assert read(files, files.find(text)) == text[:12]
        assert files.write(kv_of(text[:22]), text[:22], 0, "c", "22")
        assert read(files, files.find(text)) == text[:22]


def test_deleting_a_conversation_keeps_of_it_only_what_others_need(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    system = list(range(8))
    store(files, [*system, *range(900, 910)], "a", "a1")
    store(files, [*system, 1, 2, 3, 4, 5], "b", "b1")
    files.drop_conversation("a")
    for again in (files, open_files(tmp_path)):
        assert read(again, again.find([*system, 1, 2, 3, 4, 5])) == [*system, 1, 2, 3, 4, 5]
        assert again.find([*system, *range(900, 910)]).num_tokens == 8
        assert {span.conversation for span in again.spans()} == {"", "b"}
    assert not any(b"900" in path.read_bytes()[:2000] for path in files.folder.iterdir())
    files.drop_conversation("b")
    assert list(files.folder.iterdir()) == []


def test_what_other_models_left_goes_when_all_is_too_much(tmp_path: Path) -> None:
    text = list(range(16))
    for name in ("old", "older"):
        store(open_files(tmp_path, fingerprint=name), text)
    size = open_files(tmp_path, fingerprint="old").num_bytes
    store(open_files(tmp_path), text)
    files = open_files(tmp_path, most=2 * size)
    assert files.find(text).num_tokens == 16
    assert len(list(tmp_path.iterdir())) == 2


def test_the_least_recently_used_leaves_go_when_there_is_no_room(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    texts = [[1000 * i + j for j in range(16)] for i in range(4)]
    for place, text in enumerate(texts):
        store(files, text)
        files.find(text).parts[0].span.used = place
    size = files.num_bytes // 4
    files.find(texts[0]).parts[0].span.used = 10
    files.most_bytes = 3 * size + size // 2
    store(files, [7] * 16)
    assert [files.find(text).num_tokens > 0 for text in texts] == [True, False, False, True]


def test_a_disk_that_fills_up_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system itself refuses, in the middle of a file."""
    files = open_files(tmp_path)
    first, second = list(range(16)), list(range(16, 32))
    store(files, first)
    many = np.repeat(kv_of(second), 1000, axis=1)
    with files_of_at_most(20_000):
        assert not files.write(many, second, 0, "c", "l")
    assert not files.write(many, second, 0, "c", "l")  # Not asked again at once.
    assert files.find(second).num_tokens == 0
    assert read(files, files.find(first)) == first
    assert len(list(files.folder.iterdir())) == 1
    monkeypatch.setattr("localpaged.engine.kv_files.time.monotonic", lambda: time.perf_counter() + 1e6)
    assert files.write(many, second, 0, "c", "l")
    assert read(files, files.find(second)) == second


def test_deleting_a_conversation_or_a_branch_deletes_its_files(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    common = list(range(8))
    store(files, common, "a", "a1")
    store(files, [*common, 1, 2, 3, 4], "a", "a2")
    store(files, [*common, 5, 6, 7, 8], "b", "b1")
    files.drop_leases(["a2"])
    assert len(files.spans()) == 2
    files.drop_conversation("a")
    assert files.find([*common, 5, 6, 7, 8]).num_tokens == 12  # "b" still needs the beginning
    files.drop_conversation("b")
    assert list(files.folder.iterdir()) == []


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("on_disk", [True, False])
def test_random_trees_are_read_as_they_were_written(
    seed: int, on_disk: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Append, branch, prune, restart, evict: whatever is found holds exactly the tokens that were asked for."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("kv")
    files: SpanStore = open_files(folder) if on_disk else KvHost(BLOCK, 1 << 30)
    texts: list[list[int]] = [[]]
    for step in range(40):
        match rng.randrange(6):
            case 0 if on_disk:
                files = open_files(folder)
            case 1:
                files.drop_leases([str(rng.randrange(40))])
            case 2:
                files.most_bytes = rng.choice([1 << 30, 12_000])
            case _:
                base = rng.choice(texts)
                text = [*base[: rng.randint(0, len(base))], *(rng.randrange(2) for _ in range(rng.randint(1, 9)))]
                texts.append(text)
                store(files, text, str(rng.randrange(3)), str(step))
        for text in texts:
            found = files.find(text)
            assert read(files, found) == text[: found.num_tokens]
