"""`localpaged bench`: how fast this machine prefills and decodes, by the whole engine.

A work n:context:steps prefills context tokens once, then decodes steps tokens for each of n
candidates that share that prompt, sampling at temperature 0.8.
"""

import json
import re
import time

from localpaged.config import Settings
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import SettingError
from localpaged.models.locate import locate_model

DEFAULT_WORKS = ["1:256:32", "4:256:32", "8:256:32", "16:256:32", "1:2000:32", "4:2000:32", "8:2000:32"]


def parse_work(text: str) -> tuple[int, int, int]:
    """(n, context, steps) of "n:context:steps". Raises SettingError."""
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*:[1-9]\d*", text):
        raise SettingError(f"--work is {text!r}; write n:context:steps, for example 4:256:32.")
    n, context, steps = map(int, text.split(":"))
    if context < 2:
        raise SettingError(f"--work {text} has a context of {context}; give at least 2.")
    return n, context, steps


def make_prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    """Token ids that no other work shares, so that no prefix cache helps by accident."""
    span = min(40000, vocab_size - 101)
    return [(i * 37 + seed * 1009) % span + 100 for i in range(length)]


def run_bench(works: list[str], settings: Settings, json_output: bool) -> None:
    """Run the works one after the other and print a line for each. Raises SettingError before any runs."""
    parsed = [parse_work(work) for work in works]
    from localpaged.engine.llm import LLM

    model = locate_model(settings.model)
    config = settings.engine_config(model.path, model.name)
    llm = LLM(str(model.path), **{f: getattr(config, f) for f in config.__struct_fields__ if f != "model"})
    vocab_size = llm.vocab_size

    def generate(tokens: list[int], n: int, steps: int) -> float:
        params = SamplingParams(n=n, max_tokens=steps, ignore_eos=True, temperature=0.8 if steps > 1 else 0)
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": tokens}, params)
        return time.perf_counter() - start

    generate(make_prompt(64, 9, vocab_size), 1, 8)
    for n, context, steps in parsed:
        # What is compiled for a number of rows is compiled before it is timed.
        generate(make_prompt(64, 9000 + n, vocab_size), n, 2)
        tokens = make_prompt(context, n + context, vocab_size)
        prefill_s = generate(tokens, 1, 1)
        decode_s = generate(tokens, n, steps)
        line = {
            "peer": "localpaged",
            "n": n,
            "context": context,
            "steps": steps,
            "prefill_tok_s": round(context / prefill_s, 1),
            "decode_tok_s": round(n * steps / decode_s, 1),
            "step_ms": round(decode_s / steps * 1000, 2),
        }
        if json_output:
            print(json.dumps(line), flush=True)
        else:
            print(
                f"{n:>3} candidates, {context:>5} tokens of context: prefill {line['prefill_tok_s']:>8} tok/s, "
                f"decode {line['decode_tok_s']:>7} tok/s ({line['step_ms']} ms a step)",
                flush=True,
            )
