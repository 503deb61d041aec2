"""Time to first token of a second turn with a peer's own prefix cache; run by that peer's Python.

    peer_turns.py llamacpp|openvino MODEL CHATS CONTEXT...

CHATS: a JSON file of [history, second prompt] pairs of token ids. Prints JSON lines in the form of bench_sessions.py.
"""

import json
import statistics
import sys
import time

NEW_TOKENS = 32


def token_ids(length, seed):
    return [(i * 37 + seed * 1009) % 40000 + 100 for i in range(length)]


def say(peer, kv, context, new_tokens, times):
    line = {"what": "turn", "peer": peer, "kv": kv, "context": context, "new_tokens": new_tokens}
    print(json.dumps(line | {"ttft_s": round(statistics.median(times), 4)}), flush=True)


def openvino(model, chats, contexts):
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 3, True
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")

    def first_token(tokens):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = 1, True
        start = time.perf_counter()
        pipeline.generate([ov.Tensor(np.array([tokens], dtype=np.int64))], [config])
        return time.perf_counter() - start

    first_token(token_ids(600, 1))
    for context in contexts:
        history = token_ids(context, context)
        say("openvino", "computed", context, 0, [first_token(history)])
        times = [first_token(history + token_ids(NEW_TOKENS, context + 1 + i)) for i in range(5)]
        say("openvino", "prefix cache", context, NEW_TOKENS, times)
    times = []
    for history, prompt in chats:
        first_token(history)
        times.append(first_token(prompt))
    say("openvino", "prefix cache", "MT-bench", None, times)


def llamacpp(model, chats, contexts):
    import llama_cpp as L

    L.llama_backend_init()
    quiet = L.llama_log_callback(lambda level, text, data: None)
    L.llama_log_set(quiet, None)
    loaded = L.llama_model_load_from_file(model.encode(), L.llama_model_default_params())
    params = L.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 8192, 2048, 512, 2, 2
    ctx = L.llama_init_from_model(loaded, params)
    memory = L.llama_get_memory(ctx)

    def put(tokens, begin):
        start = time.perf_counter()
        for first in range(0, len(tokens), 2048):
            part = tokens[first : first + 2048]
            batch = L.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, begin + first + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, i == len(part) - 1
            assert L.llama_decode(ctx, batch) == 0
            L.llama_synchronize(ctx)
            L.llama_batch_free(batch)
        return time.perf_counter() - start

    put(token_ids(64, 1), 0)
    for context in contexts:
        L.llama_memory_clear(memory, True)
        say("llamacpp", "computed", context, 0, [put(token_ids(context, context), 0)])
        times = []
        for i in range(5):
            L.llama_memory_seq_rm(memory, 0, context, -1)
            times.append(put(token_ids(NEW_TOKENS, context + 1 + i), context))
        say("llamacpp", "kept slot", context, NEW_TOKENS, times)
    times = []
    for history, prompt in chats:
        L.llama_memory_clear(memory, True)
        put(history, 0)
        times.append(put(prompt[len(history) :], len(history)))
    say("llamacpp", "kept slot", "MT-bench", None, times)


if __name__ == "__main__":
    peer, model, chats, *contexts = sys.argv[1:]
    with open(chats) as file:
        {"openvino": openvino, "llamacpp": llamacpp}[peer](model, json.load(file), [int(word) for word in contexts])
