"""What is asked of a server, and when: MT-bench's questions, or requests as long as those of the Azure trace.

Sources: https://github.com/lm-sys/FastChat (MT-bench), https://github.com/Azure/AzurePublicDataset (Splitwise).
"""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path

from localpaged.errors import SettingError

DATA = Path(__file__).parent / "data"
TRACE = DATA / "azure_llm_conversations_2023.csv"
PROMPTS = DATA / "mt_bench_questions.jsonl"
# Short and common, so that most tokenizers have one token for each with the space before it.
COMMON_TEXT = (
    "the of and to in is that for it was on are as with they be at one have this from by hot but some what there we "
    "can out other were all your when up use word how said each which do their time if will way about many then them "
    "would write like so these her long make thing see him two has look more day could go come did my sound no most "
    "number who over know water than call first people may down side been now find head stand own page should country "
    "found answer school grow study still learn plant cover food sun four thought let keep eye never last door between "
    "city tree cross since hard start might story saw far sea draw left late run while press close night real life few"
)
WORDS = COMMON_TEXT.split()


@dataclass(frozen=True, slots=True)
class Question:
    """One request's part of a work: the text, or how many tokens of text; max_tokens of the answer."""

    text: str | None = None
    num_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Questions asked one after the other in one conversation, the first at arrival_s; None: as soon as may be."""

    questions: list[Question]
    arrival_s: float | None = None


def mt_bench(path: Path, num_requests: int) -> list[Chat]:
    """Conversations of a JSON-lines file whose lines have turns, over again until there are enough requests."""
    turns = []
    for number, line in enumerate(_lines(path), 1):
        try:
            given = json.loads(line)["turns"]
            if not given or not all(isinstance(text, str) and text for text in given):
                raise ValueError("turns must be texts")
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f"{path}, line {number}: {error!r}. Each line is an object with turns, a list of texts."
            ) from error
        turns.append(given)
    if not turns:
        raise SettingError(f"{path} has no questions.")
    chats: list[Chat] = []
    left = num_requests
    for texts in cycle(turns):
        chats.append(Chat([Question(text) for text in texts[:left]]))
        left -= len(texts)
        if left <= 0:
            return chats
    raise AssertionError


def azure(path: Path, num_requests: int, speed: float, max_input_tokens: int | None) -> list[Chat]:
    """The first requests of a trace, with its lengths, at its own times divided by speed."""
    rows = []
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        try:
            # Seven digits of a second are more than datetime reads.
            moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
            rows.append((moment, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise SettingError(
                f"{path}, line {number}: {error!r}. The columns are TIMESTAMP, ContextTokens, GeneratedTokens."
            ) from error
        if len(rows) == num_requests:
            break
    if len(rows) < num_requests:
        raise SettingError(f"{path} has {len(rows)} requests. Give --num-requests {len(rows)}, or a longer --trace.")
    longest = max_input_tokens or max(context for _, context, _ in rows)
    first = rows[0][0]
    return [
        Chat(
            [Question(num_tokens=max(min(context, longest), 1), max_tokens=max(generated, 1))],
            (moment - first).total_seconds() / speed,
        )
        for moment, context, generated in rows
    ]


def arrivals(count: int, rate: float, seed: int) -> Iterator[float]:
    """Times of a Poisson process with so many arrivals a second, the first at 0."""
    source = random.Random(seed)
    now = 0.0
    for _ in range(count):
        yield now
        now += source.expovariate(rate)


def words(count: int, seed: int) -> str:
    """Text of so many words that begins like no other seed's, so that no prefix cache helps by accident."""
    source = random.Random(seed)
    return " ".join(islice(iter(lambda: source.choice(WORDS), None), count))


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
