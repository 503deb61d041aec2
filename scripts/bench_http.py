"""Tokens a second through HTTP beside those of the engine alone, in turns on one machine: python scripts/bench_http.py.

Two engines are loaded, one with the server before it; while one answers the other waits. Every round asks both for
the same: n candidates of so many tokens, streamed. Prints each round and the medians' ratio.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import httpx

from localpaged.config import load_settings
from localpaged.engine.client import EngineClient
from localpaged.engine.messages import Delta
from localpaged.engine.sampling_params import SamplingParams
from localpaged.models.locate import locate_model

PROMPT = list(range(100, 356))


async def engine_alone(engine: EngineClient, n: int, max_tokens: int, seed: int) -> float:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, temperature=0.8, seed=seed)
    count, first = 0, 0.0
    async for event in engine.generate(PROMPT, params):
        if isinstance(event, Delta):
            first = first or time.perf_counter()
            count += len(event.token_ids)
    return (count - n) / (time.perf_counter() - first)


def through_http(client: httpx.Client, n: int, max_tokens: int, seed: int) -> float:
    body = {
        "prompt": PROMPT,
        "n": n,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, tokens = 0.0, 0
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            first = first or time.perf_counter()
            if '"usage":{' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return (tokens - n) / (time.perf_counter() - first)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--n", type=int, default=8)
    arguments.add_argument("--max-tokens", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=7)
    given = arguments.parse_args()
    home = tempfile.mkdtemp()
    os.environ["LOCALPAGED_HOME"] = home
    asyncio.run(compare(given.n, given.max_tokens, given.rounds))


async def compare(n: int, max_tokens: int, rounds: int) -> None:
    command = [sys.executable, "-m", "localpaged", "serve", "--port", "7997", "--kv-cache-memory", "1G"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    model = locate_model(None)
    engine = EngineClient(load_settings(kv_cache_memory="1G").engine_config(model.path, model.name))
    try:
        with httpx.Client(base_url="http://127.0.0.1:7997", timeout=120) as client:
            while True:
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.5)
            await engine.start()
            await engine.wait_ready()
            alone, http = [], []
            for number in range(rounds + 1):
                pair = await engine_alone(engine, n, max_tokens, number), through_http(client, n, max_tokens, number)
                # The first round compiles.
                if number:
                    alone.append(pair[0])
                    http.append(pair[1])
                    told = f"engine alone {pair[0]:7.1f} tok/s, through HTTP {pair[1]:7.1f}"
                    print(f"{told}, ratio {pair[1] / pair[0]:.3f}", flush=True)
            ratios = [one / other for one, other in zip(http, alone, strict=True)]
            medians = f"{statistics.median(alone):.1f} and {statistics.median(http):.1f}"
            print(f"medians {medians}, median ratio {statistics.median(ratios):.3f}")
    finally:
        server.terminate()
        server.wait()
        await engine.stop()


if __name__ == "__main__":
    main()
