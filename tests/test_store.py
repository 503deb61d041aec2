"""The conversation store: trees, search, and what a killed server left; its file is in test_database.py."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localpaged.errors import InvalidRequestError
from localpaged.store.conversation_search import search_conversations
from localpaged.store.conversations import Conversations, _insert
from localpaged.store.message import Timings, pack_token_ids, unpack_token_ids
from localpaged.store.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with closing(Store(path)) as store:
        yield store


@pytest.fixture
def chats(store: Store) -> Conversations:
    return store.conversations


def answered(chats: Conversations, parent: int, count: int = 1) -> list[int]:
    """Complete answers under a user message; their ids."""
    messages = chats.add_candidates(parent, count, "tiny", {"temperature": 0.8})
    for message in messages:
        message.text, message.state = f"answer {message.candidate}", "complete"
    chats.save_messages(messages)
    return [message.id for message in messages]


def shown(chats: Conversations, conversation_id: int) -> list[int]:
    return [turn.message.id for turn in chats.branch(conversation_id).turns]


def test_everything_a_message_holds_survives_reopening(path: Path) -> None:
    with closing(Store(path)) as store:
        chats = store.conversations
        conversation = chats.create(system_prompt="Be brief.", settings={"n": 4})
        user = chats.add_user_message(conversation.id, None, "What is\tpaging?\n\n    code 🐙")
        user.token_ids, user.num_kept_tokens = [1, 2, 70_000], 0
        answer = chats.add_candidates(user.id, 1, "tiny", {"temperature": 0.8, "seed": 2**63})[0]
        answer.text, answer.token_ids, answer.state = "Blocks.", [5, 2**32 - 1], "complete"
        answer.finish_reason = "stop"
        answer.timings = Timings(ttft_s=0.25, tokens_per_s=61.5, num_tokens=2, num_cached_tokens=0)
        chats.save_messages([user, answer])
    with closing(Store(path)) as store:
        again = [turn.message for turn in store.conversations.branch(conversation.id).turns]
        assert again == [chats_message(user, chosen_child=answer.id), answer]
        assert store.conversations.get(conversation.id).settings == {"n": 4}


def chats_message(message, **changes):  # type: ignore[no-untyped-def]
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_a_single_answer_is_shown_at_once_and_several_leave_the_choice_open(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hello")
    (only,) = answered(chats, user.id)
    assert shown(chats, conversation.id) == [user.id, only]
    second = chats.add_user_message(conversation.id, only, "More")
    four = answered(chats, second.id, 4)
    branch = chats.branch(conversation.id)
    assert [turn.message.id for turn in branch.turns] == [user.id, only, second.id]
    assert [message.id for message in branch.open_candidates] == four
    assert [message.candidate for message in branch.open_candidates] == [0, 1, 2, 3]


def test_the_chosen_answer_is_shown_after_reopening(path: Path) -> None:
    with closing(Store(path)) as store:
        conversation = store.conversations.create()
        user = store.conversations.add_user_message(conversation.id, None, "Hello")
        ids = answered(store.conversations, user.id, 4)
        store.conversations.choose(ids[2])
    with closing(Store(path)) as store:
        branch = store.conversations.branch(conversation.id)
        assert branch.turns[-1].message.id == ids[2]
        assert branch.turns[-1].sibling_ids == ids
        assert branch.open_candidates == []


def test_switching_back_to_a_sibling_shows_the_turns_that_followed_it(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hello")
    ids = answered(chats, user.id, 2)
    chats.choose(ids[0])
    later = chats.add_user_message(conversation.id, ids[0], "Go on")
    (end,) = answered(chats, later.id)
    chats.choose(ids[1])
    assert shown(chats, conversation.id) == [user.id, ids[1]]
    chats.choose(ids[0])
    assert shown(chats, conversation.id) == [user.id, ids[0], later.id, end]


def test_editing_a_user_message_makes_a_sibling_and_keeps_the_old_branch(chats: Conversations) -> None:
    conversation = chats.create()
    first = chats.add_user_message(conversation.id, None, "Helo")
    (old_answer,) = answered(chats, first.id)
    edited = chats.add_user_message(conversation.id, None, "Hello")
    branch = chats.branch(conversation.id)
    assert [turn.message.text for turn in branch.turns] == ["Hello"]
    assert branch.turns[0].sibling_ids == [first.id, edited.id]
    chats.choose(first.id)
    assert shown(chats, conversation.id) == [first.id, old_answer]


def test_regenerating_reopens_the_choice_and_drops_only_answers_that_failed_empty(
    chats: Conversations,
) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hello")
    failed, partial = chats.add_candidates(user.id, 2, None, {})
    failed.state = partial.state = "error"
    partial.text = "Half an ans"
    chats.save_messages([failed, partial])
    new = answered(chats, user.id, 2)
    assert [message.id for message in chats.branch(conversation.id).open_candidates] == [partial.id, *new]


def test_sending_from_a_hidden_branch_shows_that_branch(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hello")
    first, second = answered(chats, user.id, 2)
    chats.choose(second)
    sent = chats.add_user_message(conversation.id, first, "Go on")
    assert shown(chats, conversation.id) == [user.id, first, sent.id]


def test_reopening_a_choice_keeps_all_answers(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hello")
    ids = answered(chats, user.id, 3)
    chats.choose(ids[1])
    chats.reopen_choice(user.id)
    assert [message.id for message in chats.branch(conversation.id).open_candidates] == ids
    with pytest.raises(InvalidRequestError, match="user message"):
        chats.reopen_choice(ids[0])


def test_a_long_branch_is_read_in_windows(chats: Conversations) -> None:
    conversation = chats.create()
    parent, ids = None, []
    for turn in range(10):
        user = chats.add_user_message(conversation.id, parent, f"question {turn}")
        (parent,) = answered(chats, user.id)
        ids += [user.id, parent]
    last = chats.branch(conversation.id, limit=6)
    assert [turn.message.id for turn in last.turns] == ids[-6:]
    assert last.num_earlier == 14
    earlier = chats.branch(conversation.id, limit=6, before=ids[-6])
    assert [turn.message.id for turn in earlier.turns] == ids[-12:-6]
    assert earlier.num_earlier == 8


def test_path_to_gives_the_messages_from_the_root(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "one")
    first, second = answered(chats, user.id, 2)
    later = chats.add_user_message(conversation.id, second, "two")
    assert [message.id for message in chats.path_to(later.id)] == [user.id, second, later.id]
    assert chats.path_to(None) == []


def test_a_parent_of_another_conversation_is_refused(chats: Conversations) -> None:
    one, other = chats.create(), chats.create()
    user = chats.add_user_message(one.id, None, "Hello")
    with pytest.raises(InvalidRequestError, match="not part of conversation"):
        chats.add_user_message(other.id, user.id, "Hello")


def test_deleting_answers_prunes_what_is_under_them_and_shows_a_sibling(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hello")
    first, second = answered(chats, user.id, 2)
    chats.choose(second)
    later = chats.add_user_message(conversation.id, second, "Go on")
    chats.delete_messages([second])
    assert shown(chats, conversation.id) == [user.id, first]
    with pytest.raises(InvalidRequestError, match="no message"):
        chats.message(later.id)
    chats.delete_messages([user.id])
    assert shown(chats, conversation.id) == []


def test_a_conversation_of_any_length_can_be_cut_and_deleted(path: Path) -> None:
    with closing(Store(path)) as store:
        chats = store.conversations
        conversation, parent, ids = chats.create(), None, []
        with store._database.transaction() as connection:
            for _ in range(2500):
                parent = _insert(connection, conversation.id, parent, "user", "again", "complete")
                ids.append(parent)
        chats.delete_messages([ids[1200]])
        assert shown(chats, conversation.id) == ids[:1200]
        chats.delete(conversation.id)
    with closing(Store(path)) as store:
        assert store._database.rows("SELECT count(*) AS n FROM messages")[0]["n"] == 0


def test_deleted_conversations_come_back_until_they_are_purged(path: Path) -> None:
    with closing(Store(path)) as store:
        chats = store.conversations
        kept, dropped = chats.create("kept"), chats.create("dropped")
        chats.add_user_message(kept.id, None, "needle one")
        user = chats.add_user_message(dropped.id, None, "needle two")
        chats.delete(kept.id)
        chats.delete(dropped.id)
        assert search_conversations(chats) == [] and search_conversations(chats, "needle") == [] and chats.count() == 0
        with pytest.raises(InvalidRequestError, match="no message"):
            chats.message(user.id)
        chats.restore(kept.id)
        assert [hit.conversation.title for hit in search_conversations(chats, "needle")] == ["kept"]
    with closing(Store(path)) as store:
        with pytest.raises(InvalidRequestError, match="no conversation"):
            store.conversations.restore(dropped.id)
        assert store._database.rows("SELECT count(*) AS n FROM messages")[0]["n"] == 1


def test_the_list_puts_pinned_conversations_first_and_then_the_latest_used(chats: Conversations) -> None:
    old, middle, new = chats.create("old"), chats.create("middle"), chats.create("new")
    chats.update(middle.id, pinned=True)
    chats.add_user_message(old.id, None, "bump")
    assert [hit.conversation.title for hit in search_conversations(chats)] == ["middle", "old", "new"]
    assert chats.get(new.id).pinned is False


def test_archived_conversations_stand_last_until_something_is_written_in_them(chats: Conversations) -> None:
    old, new = chats.create("old"), chats.create("new")
    chats.update(new.id, archived=True, pinned=True)
    assert [hit.conversation.title for hit in search_conversations(chats)] == ["old", "new"]
    chats.add_user_message(new.id, None, "again")
    assert [hit.conversation.title for hit in search_conversations(chats)] == ["new", "old"]
    assert not chats.get(new.id).archived and chats.get(old.id).title == "old"


def test_search_shows_the_latest_messages_that_match_and_how_many_there_are(chats: Conversations) -> None:
    conversation = chats.create("The lamp room")
    parent = None
    for text in ("Any lamp", "No light", "One lamp", "Two lamps", "Three lamps"):
        parent = chats.add_user_message(conversation.id, parent, text).id
    (hit,) = search_conversations(chats, "lamp")
    assert hit.marked_title == "The \x02lamp\x03 room" and hit.num_hits == 4
    assert [one.snippet for one in hit.hits] == ["Three \x02lamps\x03", "Two \x02lamps\x03", "One \x02lamp\x03"]
    assert hit.hits[0].message == parent and hit.snippet == hit.hits[0].snippet
    (other,) = search_conversations(chats, "light")
    assert other.marked_title is None and other.num_hits == 1
    for place in range(4):
        chats.create(f"lamp {place}")
    assert [len(one.hits) for one in search_conversations(chats, "lamp", limit=2)] == [0, 0]


@pytest.mark.parametrize("query", ["C++", "it's", "foo-bar", '"quoted', "AND", "lamp*", "Émigré", "emig"])
def test_search_finds_words_with_marks_and_operators(chats: Conversations, query: str) -> None:
    conversation = chats.create("Plain title")
    chats.add_user_message(conversation.id, None, 'C++ AND it\'s foo-bar, "quoted" lamps for an émigré')
    assert [hit.conversation.id for hit in search_conversations(chats, query)] == [conversation.id]


def test_search_shows_where_it_matched_and_finds_titles(chats: Conversations) -> None:
    conversation = chats.create("Names for the lighthouse museum")
    user = chats.add_user_message(conversation.id, None, "Give me one quiet name")
    (hit,) = search_conversations(chats, "quiet")
    assert hit.snippet == "Give me one \x02quiet\x03 name"
    assert search_conversations(chats, "lighthouse")[0].snippet == "Names for the \x02lighthouse\x03 museum"
    chats.update(conversation.id, title="Harbour")
    assert search_conversations(chats, "lighthouse") == []
    (answer,) = chats.add_candidates(user.id, 1, None, {})
    answer.text = "Stillwater"
    chats.save_messages([answer])
    assert len(search_conversations(chats, "stillw")) == 1
    assert len(search_conversations(chats, "  ...  ")) == 1  # no word to look for: the whole list


def test_opening_marks_what_ran_as_interrupted_with_its_text(path: Path) -> None:
    with closing(Store(path)) as store:
        conversation = store.conversations.create()
        user = store.conversations.add_user_message(conversation.id, None, "Hello")
        answer = store.conversations.add_candidates(user.id, 1, None, {})[0]
        answer.text, answer.token_ids = "So far", [7, 8]
        store.conversations.save_messages([answer])
    with closing(Store(path)) as store:
        again = store.conversations.message(answer.id)
        assert (again.state, again.text, again.token_ids) == ("interrupted", "So far", [7, 8])


def test_calls_from_the_event_loop_run_in_order_on_another_thread(store: Store) -> None:
    async def use() -> list[str]:
        chats = store.conversations
        conversation = await store.do(chats.create, "one")
        await asyncio.gather(*(store.do(chats.update, conversation.id, title=str(count)) for count in range(20)))
        return [hit.conversation.title for hit in await store.do(search_conversations, chats)]

    assert asyncio.run(use()) == ["19"]


def test_token_ids_are_packed_in_four_bytes() -> None:
    assert pack_token_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_token_ids(pack_token_ids([0, 2**32 - 1])) == [0, 2**32 - 1]
