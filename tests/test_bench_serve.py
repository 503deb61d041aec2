"""`localpaged bench serve` on a scripted engine and on servers that go wrong in every way."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from api_server import ApiEngine, serving
from faulty_server import END, GOOD, Hang, Script, event, piece, scripted, usage

from localpaged.bench import DEFAULT_WORKS
from localpaged.bench_serve import ServeBench, run_bench_serve
from localpaged.cli import main
from localpaged.errors import LocalpagedError, SettingError
from localpaged.load.chat_client import AnswerTimes, ChatClient, Outcome
from localpaged.load.plot import draw
from localpaged.load.replay import Asking, Replay
from localpaged.load.report import is_good, latencies_ms, percentile, report
from localpaged.load.workload import PROMPTS, TRACE, arrivals, azure, mt_bench, words

ROOT = Path(__file__).parent.parent


def bench(url: str, **changes: Any) -> ServeBench:
    asking = {name: changes.pop(name) for name in list(changes) if name in Asking.__dataclass_fields__}
    given = ServeBench(base_url=url, work="mt-bench", num_requests=4, asking=Asking(**({"max_tokens": 20} | asking)))
    return replace(given, **changes)


def measured(capsys: pytest.CaptureFixture[str], given: ServeBench) -> dict[str, Any]:
    run_bench_serve(given, json_output=True)
    said = capsys.readouterr()
    assert said.err == ""
    return dict(json.loads(said.out))


def test_two_turns_of_several_answers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ApiEngine(token_s=0.002)
    with serving(tmp_path, engine) as url:
        line = measured(capsys, bench(f"{url}/v1", n=3, ttft_slo_ms=60_000, plot=tmp_path / "plot.svg"))
    assert (line["completed"], line["failed"], line["n"], line["model"]) == (4, 0, 3, "fake-135M")
    assert (line["tokens_from"], line["total_output_tokens"]) == ("usage", 4 * 3 * 20)
    # The second turn's prompt holds the first answer, and the server says what it found of it.
    prompts = [engine.tokenizer.decode(prompt) for prompt in engine.prompts]
    assert sum("Answer A: it is **pa<|im_end|>" in prompt for prompt in prompts) == 2
    assert line["cached_tokens"] > 0 and line["total_input_tokens"] == sum(map(len, engine.prompts[-4:]))
    assert line["request_goodput"] == line["request_throughput"] > 0
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms"):
        figures = line[name]
        assert 0 < figures["p50"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert line["e2el_ms"]["p50"] > line["ttft_ms"]["p50"]
    assert ElementTree.fromstring((tmp_path / "plot.svg").read_text()).tag.endswith("svg")


def test_the_traces_lengths_are_made_of_words_and_told_as_the_server_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ApiEngine()
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:46.7005900,900,5"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    with serving(tmp_path, engine) as url:
        line = measured(capsys, bench(f"{url}/v1", work="azure", trace=trace, num_requests=2, max_input_tokens=600))
    assert line["completed"] == 2
    # A token of this engine is a byte; the two probes come first.
    lengths = [len(prompt) for prompt in engine.prompts[2:]]
    assert lengths == pytest.approx([374, 600], rel=0.15)
    assert line["total_input_tokens"] == sum(lengths)
    assert [params.max_tokens for params in engine.params[2:]] == [20, 5]


def test_the_report_for_people_is_on_stdout_and_no_bar_where_nobody_watches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with scripted(GOOD, (500, b'{"error": {"message": "no room"}}'), GOOD) as (url, _):
        run_bench_serve(bench(url, num_requests=3, max_concurrency=1, itl_slo_ms=1e6), json_output=False)
    said = capsys.readouterr()
    assert said.err == ""
    assert "scripted: 2 requests completed, 1 failed in " in said.out
    assert "failed: 1 × http 500 (no room)" in said.out
    assert "requests/s with token to token within 1e+06 ms" in said.out
    assert "time to first token" in said.out


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ((503, b"<html>busy</html>"), "http 503"),
        ((429, b'{"error": "slow down"}'), "http 429"),
        (b'{"choices": []}', "no stream"),
        ([piece("a"), event({"error": {"message": "engine died"}}), END], "error in the stream"),
        ([piece("a"), piece("b")], "cut off"),
        ([END], "cut off"),
        ([], "cut off"),
        ([piece("a"), Hang(None)], "connection lost"),
        ([piece("a"), event(b"{half")], "malformed stream"),
        ([event({"choices": [{"delta": {}}]})], "malformed stream"),
        ([event([1])], "malformed stream"),
        ([piece("a", index=7)], "malformed stream"),
        ([piece("a"), Hang(1.0), piece("", finish="stop")], "timeout"),
        ([piece("a", finish="error"), END], "answer failed"),
    ],
)
def test_each_kind_of_failure_is_counted_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str], script: Script, kind: str
) -> None:
    with scripted(GOOD, script, GOOD) as (url, _):
        line = measured(capsys, bench(url, num_requests=5, max_concurrency=1, timeout_s=0.3))
    # A conversation whose first turn fails is not gone on with, and that is told.
    assert line["errors"] == {kind: 1} and line["failed"] == 1
    assert line["completed"] + line["failed"] + line["not_asked"] == 5
    assert line["ttft_ms"]["p50"] > 0 and line["total_output_tokens"] == 6 * line["completed"]


def test_a_server_that_gives_fewer_answers_than_asked_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(GOOD) as (url, bodies):
        line = measured(capsys, bench(url, n=4, num_requests=2))
    assert line["errors"] == {"too few answers": 1} and line["error_details"] == {"too few answers": "1 of 4"}
    assert bodies[0]["n"] == 4 and bodies[0]["stream_options"] == {"include_usage": True}


def test_without_usage_pieces_are_counted_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stream: Script = [piece("a"), piece("b"), piece("", finish="stop"), END]
    with scripted(stream) as (url, _):
        line = measured(capsys, bench(url))
    assert (line["tokens_from"], line["total_output_tokens"], line["total_input_tokens"]) == ("pieces", 8, None)


def test_an_answer_without_text_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted([piece("", finish="stop"), usage(9, 0), END]) as (url, _):
        line = measured(capsys, bench(url))
    assert (line["completed"], line["without_text"], line["ttft_ms"]) == (4, 4, None)


def test_no_more_requests_run_at_once_than_allowed_and_lateness_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    slow: Script = [piece("a"), Hang(0.1), *GOOD]
    with scripted(slow) as (url, _):
        line = measured(capsys, bench(url, num_requests=6, max_concurrency=1, request_rate=1000))
    assert line["max_late_s"] > 0.15 and line["completed"] == 6


def test_the_key_comes_from_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    with scripted(GOOD) as (url, bodies):
        measured(capsys, bench(url, num_requests=1))
        measured(capsys, bench(url, num_requests=1, api_key_file=tmp_path / "key"))
    assert [body["authorization"] for body in bodies] == ["Bearer from-environment", "Bearer from-file"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"work": "sharegpt"}, "mt-bench or azure"),
        ({"num_requests": 0}, "--num-requests is 0"),
        ({"speed": -1.0}, "--speed"),
        ({"ttft_slo_ms": 0.0}, "--ttft-slo"),
        ({"plot": Path("plot.png")}, r"plot\.svg"),
        ({"plot": Path("/nowhere/plot.svg")}, "no such folder"),
        ({"prompts": Path("/nowhere.jsonl")}, "cannot be read"),
        ({"prompts": ROOT / "pyproject.toml"}, r"line 1.*turns"),
        ({"work": "azure", "trace": PROMPTS}, r"line 2.*TIMESTAMP"),
        ({"work": "azure", "num_requests": 601}, "has 600 requests"),
        ({"base_url": "localhost"}, "http://"),
        ({"api_key_file": Path("/nowhere")}, "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_asked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        run_bench_serve(replace(bench("http://127.0.0.1:9/v1"), **changes), json_output=True)


@pytest.mark.parametrize("model", [None, "named"])
def test_a_server_that_is_not_there_is_one_error(model: str | None) -> None:
    with pytest.raises(LocalpagedError, match="does not answer"):
        run_bench_serve(bench("http://127.0.0.1:9/v1", model=model), json_output=True)


def test_the_works_are_there_without_any_file_of_the_machines() -> None:
    chats = mt_bench(PROMPTS, 165)
    assert sum(len(chat.questions) for chat in chats) == 165 and len(chats) == 83
    trace = azure(TRACE, 600, speed=2.0, max_input_tokens=None)
    assert trace[0].arrival_s == 0 and trace[1].arrival_s == pytest.approx(4.314579 / 2)
    assert (trace[1].questions[0].num_tokens, trace[1].questions[0].max_tokens) == (396, 109)


def test_made_up_prompts_share_no_beginning_and_arrivals_have_their_rate() -> None:
    assert len({words(5, seed) for seed in range(200)}) == 200
    assert words(50, 3) == words(50, 3) and len(words(50, 3).split()) == 50
    times = list(arrivals(2000, 10.0, seed=1))
    assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(200, rel=0.15)


def outcome(begin: float, *answers: list[float], tokens: int | None = None, error: str | None = None) -> Outcome:
    taken = [AnswerTimes("x", list(times), "stop") for times in answers]
    return Outcome(begin, max((times[-1] for times in answers), default=begin), taken, 5, 0, tokens, error)


def test_percentiles_lie_between_the_nearest_samples() -> None:
    found = [percentile([1.0, 2.0, 3.0, 10.0], percent) for percent in (0, 50, 95, 100)]
    assert found == pytest.approx([1, 2.5, 8.95, 10])
    assert percentile([7.0], 99) == 7


def test_each_answer_of_a_request_counts_and_a_request_is_good_when_all_of_them_are() -> None:
    # Two answers of 3 and 2 pieces; the server counts ten tokens for both together.
    one = outcome(10.0, [10.5, 10.7, 11.1], [10.8, 11.0], tokens=10)
    samples = latencies_ms([one])
    assert samples["ttft_ms"] == pytest.approx([500, 800])
    assert samples["itl_ms"] == pytest.approx([200, 200, 400])
    assert samples["tpot_ms"] == pytest.approx([200 / 3, 600 / 5])
    assert samples["e2el_ms"] == pytest.approx([1100])
    assert is_good(one, 800.1, 120.1) and not is_good(one, 799, None) and not is_good(one, None, 119)
    assert not is_good(outcome(0.0, [1.0], error="timeout"), None, None)


def test_goodput_counts_only_requests_that_met_both_objectives_over_the_whole_time() -> None:
    replay = Replay(ChatClient("http://127.0.0.1:9", None, 1), Asking(model="m"), lambda _: None)
    replay.outcomes = [
        outcome(0.0, [0.1, 0.2]),
        outcome(0.0, [0.1, 0.9]),
        outcome(0.0, [0.5, 0.6]),
        outcome(0.0, [0.1, 4.0], error="cut off"),
    ]
    line = report(replay, 200, 300)
    assert (line["completed"], line["request_goodput"], line["request_throughput"]) == (3, 0.25, 0.75)
    assert line["e2el_ms"]["max"] == 900
    asyncio.run(replay.client.close())
    picture = ElementTree.fromstring(draw(replay, line | {"work": "<b>&"}))
    drawn = [path.get("class") for path in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert (drawn.count("wait"), drawn.count("write"), drawn.count("fail")) == (3, 3, 1)
    assert any("<b>&" in (text.text or "") for text in picture.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_picture_of_nothing_and_of_much_can_be_drawn(count: int) -> None:
    replay = Replay(ChatClient("http://127.0.0.1:9", None, 1), Asking(model="m"), lambda _: None)
    replay.outcomes = [outcome(place * 0.01, [place * 0.01 + 0.5, place * 0.01 + 0.6]) for place in range(count)]
    picture = draw(replay, report(replay, 400, None) | {"work": "azure"})
    assert "nan" not in picture and len(picture) < 200_000
    ElementTree.fromstring(picture)
    asyncio.run(replay.client.close())


def program(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["localpaged", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "works"),
    [
        ([], DEFAULT_WORKS),
        (["4:256:32"], ["4:256:32"]),
        (["--work", "1:2:3", "4:5:6", "--json"], ["1:2:3", "4:5:6"]),
        (["engine", "4:5:6"], ["4:5:6"]),
    ],
)
def test_works_are_still_the_engines_without_a_commands_name(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], works: list[str]
) -> None:
    ran: list[tuple[list[str], bool]] = []
    monkeypatch.setattr("localpaged.bench.run_bench", lambda works, settings, as_json: ran.append((works, as_json)))
    program(monkeypatch, *arguments)
    assert ran == [(works, "--json" in arguments)]


def test_the_command_line_hands_its_options_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with scripted(GOOD) as (url, bodies):
        options = "--num-prompts 3 --concurrency 2 --max-tokens 7 --temperature 0.5 --ignore-eos --ttft-slo 5000 --json"
        program(monkeypatch, "serve", "--base-url", url, "--plot", str(tmp_path / "a.svg"), *options.split())
    line = json.loads(capsys.readouterr().out)
    assert (line["completed"], line["ttft_slo_ms"]) == (3, 5000) and line["request_goodput"] > 0
    assert {"max_tokens": 7, "temperature": 0.5, "ignore_eos": True, "stream": True}.items() <= bodies[0].items()
    assert (tmp_path / "a.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "usage", "says"),
    [
        (["--help"], " bench [OPTIONS] [[WORK]...]", "localpaged bench serve"),
        (["serve", "--help"], " bench serve [OPTIONS]", "--ttft-slo"),
    ],
)
def test_help_shows_each_command_as_it_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], usage: str, says: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    program(monkeypatch, *arguments)
    said = " ".join(capsys.readouterr().out.split())
    assert usage in said and says in said
