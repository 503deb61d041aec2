"""Write tests/data/greedy_smollm2.json: what transformers answers greedily on ten prompts, for the tests to compare to.

    .venv/bin/python scripts/golden_answers.py

transformers' own Llama in float32, on the CPU, with the weights of the default model's file dequantised by the gguf
package, answers the first turn of every eighth MT-bench question. Beside the answers stand the ties: tokens that come
so close behind the chosen one that an engine with other rounding may choose them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from localpaged.models.chat_tokenizer import load_tokenizer
from localpaged.models.gguf_header import read_header, transformers_config
from localpaged.models.gguf_weights import GgufWeights
from localpaged.models.locate import locate_model

DATA = Path(__file__).parent.parent / "tests" / "data"
ANSWERS = DATA / "greedy_smollm2.json"
NUM_PROMPTS = 10
NUM_TOKENS = 64
# Two tokens whose scores differ by less than the engine's own error may come in either order.
TIE = 1e-2


def reference_model(path: Path) -> Any:
    """transformers' own Llama in float32 with the weights of the file, dequantised by the gguf package."""
    header = read_header(path)
    config = transformers_config(header)
    weights = GgufWeights(path, header, config)
    with torch.device("meta"):
        names = [name for name in transformers.LlamaForCausalLM(config).state_dict() if name != "lm_head.weight"]
    state = {name: weights.tensor(name) for name in names}
    # Not through load_state_dict(): the model would draw random weights first, which takes seconds.
    model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return model.eval()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def questions() -> list[dict[str, Any]]:
    """The MT-bench questions that are asked."""
    lines = (DATA / "mt_bench_questions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:: len(lines) // NUM_PROMPTS][:NUM_PROMPTS]]


def scores(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The scores of all tokens, before each token of the answer. [len(answer), vocabulary]"""
    with torch.inference_mode():
        return model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]


def greedy_answer(model: Any, prompt: list[int], eos_token_ids: list[int]) -> list[int]:
    """The greedy answer, with the token that ends it, if it ends before NUM_TOKENS."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=eos_token_ids,
        pad_token_id=eos_token_ids[0],
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def main() -> None:
    path = locate_model(None).path
    tokenizer = load_tokenizer(path)
    model = reference_model(path)
    prompts = []
    for question in questions():
        prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question["turns"][0]}]))
        answer = greedy_answer(model, prompt, sorted(tokenizer.eos_token_ids))
        logits = scores(model, prompt, answer)
        assert logits.argmax(-1).tolist() == answer, "generate() and one pass over the whole differ"
        behind = logits.max(-1, keepdim=True).values - logits
        ties = [
            [position, token_id, round(float(behind[position, token_id]), 6)]
            for position, token_id in (behind < TIE).nonzero().tolist()
            if token_id != answer[position]
        ]
        prompts.append(
            {
                "question_id": question["question_id"],
                "prompt_token_ids": prompt,
                "token_ids": answer,
                # Each: position in token_ids, the other token, how far its score is behind.
                "ties": ties,
            }
        )
        nearest = float(logits.topk(2).values.diff().abs().min())
        print(f"question {question['question_id']}: {len(answer)} tokens, {nearest:.4f} at the closest, {ties}")
    made = {
        "made_by": "scripts/golden_answers.py: greedy, float32, on the CPU",
        "model": path.name,
        "sha256": sha256(path),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in made.items()]
    body = ",\n".join(json.dumps(prompt) for prompt in prompts)
    ANSWERS.write_text("{\n" + "".join(lines) + f'"prompts": [\n{body}\n]\n}}\n')


if __name__ == "__main__":
    main()
