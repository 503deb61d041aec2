"""Prompts are built on the stored token ids, and only what differs is encoded again."""

from fakes import END, FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st

from localpaged.server.history import beginning_of, branch_token_ids, build_prompt, record_span
from localpaged.store.message import Message


def user(text: str) -> Message:
    return Message(id=0, conversation=1, parent=None, role="user", text=text)


def assistant(text: str, token_ids: list[int]) -> Message:
    return Message(id=0, conversation=1, parent=None, role="assistant", text=text, token_ids=token_ids)


def ask(tokenizer: FakeTokenizer, path: list[Message], text: str, system: str = "") -> int:
    """Append a user message with its span; how many ids were kept."""
    message = user(text)
    prompt = build_prompt(tokenizer, system, [*path, message])
    record_span(message, path, prompt)
    path.append(message)
    assert branch_token_ids(path) == prompt.token_ids
    return prompt.num_kept


def test_the_first_prompt_is_the_rendered_template() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    assert ask(tokenizer, path, "Hi", system="Be brief.") == 0
    assert tokenizer.decode(branch_token_ids(path)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_written_in_unusual_tokens_is_kept_as_it_was_generated() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    path.append(assistant("crab", [*b"crab", END]))  # the encoder would write "ab" as one token
    before = branch_token_ids(path)
    assert ask(tokenizer, path, "More") == len(before)
    assert branch_token_ids(path)[: len(before)] == before


def test_ids_that_the_model_has_no_token_for_are_written_anew() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    before = len(branch_token_ids(path))
    path.append(assistant("crab", [70_000, *b"crab", END]))
    assert ask(tokenizer, path, "More") <= before
    assert max(branch_token_ids(path)) < tokenizer.vocab_size
    assert tokenizer.decode(branch_token_ids(path)).count("crab") == 1
    assert beginning_of(tokenizer, path[1]) == (tokenizer.encode("crab"), "crab")


def test_an_answer_cut_at_the_length_limit_is_closed_by_the_template() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    path.append(assistant("cut", list(b"cut")))
    before = branch_token_ids(path)
    assert ask(tokenizer, path, "More") == len(before)
    assert tokenizer.decode(branch_token_ids(path)).endswith(
        "cut<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_trims_answers_keeps_what_comes_before_the_difference() -> None:
    tokenizer = FakeTokenizer(strips=True)
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    path.append(assistant("padded  ", [*b"padded  ", END]))
    before = branch_token_ids(path)
    kept = ask(tokenizer, path, "More")
    assert len(before) - 5 <= kept < len(before) - 2
    assert "padded<|im_end|>" in tokenizer.decode(branch_token_ids(path))
    path.append(assistant("ok", [*b"ok", END]))
    before = branch_token_ids(path)
    assert ask(tokenizer, path, "Again") == len(before)  # the repaired span is what the next turn builds on


def test_a_changed_system_prompt_is_encoded_again_from_where_it_differs() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi", system="Be brief.")
    path.append(assistant("ok", [*b"ok", END]))
    kept = ask(tokenizer, path, "More", system="Be long.")
    assert tokenizer.decode(branch_token_ids(path)[:kept]) == "<|im_start|>system\nBe"
    assert "Be long." in tokenizer.decode(branch_token_ids(path))


def test_a_stop_string_that_is_not_part_of_the_text_is_encoded_again() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    path.append(assistant("answer ", list(b"answer STOP")))
    ask(tokenizer, path, "More")
    assert "answer <|im_end|>" in tokenizer.decode(branch_token_ids(path))


def test_asking_again_for_the_same_message_keeps_its_whole_span() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    prompt = build_prompt(tokenizer, "", path)
    assert prompt.num_kept == len(prompt.token_ids) == len(path[0].token_ids)


def test_half_a_character_at_the_cut_does_not_confuse_the_comparison() -> None:
    tokenizer = FakeTokenizer()
    path: list[Message] = []
    ask(tokenizer, path, "Hi")
    path.append(assistant("caf", list("café".encode())[:-1]))
    ask(tokenizer, path, "More")
    assert "caf<|im_end|>" in tokenizer.decode(branch_token_ids(path))


@given(
    st.lists(
        st.tuples(st.text("ab é🐙\n", max_size=12), st.text("ab é🐙\n", max_size=12), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_every_prompt_decodes_to_the_rendered_template(turns: list[tuple[str, str, bool]], strips: bool) -> None:
    tokenizer = FakeTokenizer(strips)
    path: list[Message] = []
    for question, answer, ends in turns:
        ask(tokenizer, path, question)
        messages = [{"role": message.role, "content": message.text} for message in path]
        assert tokenizer.decode(branch_token_ids(path)) == tokenizer.render_chat(messages)
        path.append(assistant(answer, list(answer.encode()) + [END] * ends))
