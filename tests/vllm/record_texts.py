"""Records what vLLM's detokenizers say for random ids: how `tests/tokens/vllm_texts.json` is made.

`python tests/vllm/record_texts.py COUNT OUT NAME=FOLDER ...`, run by the Python of vLLM's environment, with the folders
of tokenizers. For each of them: `[prompt, ids, texts]`, the texts of its fast detokenizer with special tokens, without
them, and without spaces between them, then those of its slow one with special tokens and without.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TEXTS = (" Hello", "Hello, ", "\n\n  if x:", "日本語🙂", "naïve café")
WAYS = (
    ("Fast", {"skip_special_tokens": False}),
    ("Fast", {"skip_special_tokens": True}),
    ("Fast", {"skip_special_tokens": False, "spaces_between_special_tokens": False}),
    ("Slow", {"skip_special_tokens": False}),
    ("Slow", {"skip_special_tokens": True}),
)


def said(kind: str, tokenizer: Any, prompt: list[int], ids: list[int], asked: dict[str, bool]) -> str:
    """The text that a detokenizer of vLLM makes of an answer."""
    from vllm.v1.engine import detokenizer

    from vllm import SamplingParams

    request = SimpleNamespace(
        request_id="r", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=SamplingParams(**asked)
    )
    found = getattr(detokenizer, f"{kind}IncrementalDetokenizer")(tokenizer, request)
    for token in ids:
        found.update([token], False)
    return str(found.get_next_output_text(True, False))


def some_ids(tokenizer: Any, vocabulary: dict[str, int], dice: random.Random) -> list[int]:
    """A few ids: of a text, of the bytes of characters whole and broken, of special tokens, any."""
    kind = dice.randrange(4)
    if kind == 0:
        return list(tokenizer.encode(dice.choice(TEXTS), add_special_tokens=False))
    if kind == 1 and "<0x00>" in vocabulary:
        run = dice.choice(["日", "🙂", "é", "日é"]).encode()
        return [vocabulary[f"<0x{byte:02X}>"] for byte in run[: dice.randrange(2 * len(run))]]
    if kind == 2:
        return dice.choices(tokenizer.all_special_ids, k=dice.randrange(3))
    return [dice.randrange(len(vocabulary)) for _ in range(dice.randrange(4))]


def recorded(folder: str, count: int) -> list[Any]:
    """Prompts, answers and what vLLM says."""
    from transformers import AutoTokenizer

    tokenizer, dice, found = AutoTokenizer.from_pretrained(folder), random.Random(7), []
    vocabulary = tokenizer.get_vocab()

    def several() -> list[int]:
        return [token for _ in range(dice.randrange(1, 6)) for token in some_ids(tokenizer, vocabulary, dice)]

    for _ in range(count):
        prompt, ids = several() or [5], several() or [6]
        found.append([prompt, ids, [said(kind, tokenizer, prompt, ids, asked) for kind, asked in WAYS]])
    return found


if __name__ == "__main__":
    count, out, *folders = sys.argv[1:]
    names = dict(folder.split("=", 1) for folder in folders)
    made = {name: recorded(folder, int(count)) for name, folder in names.items()}
    Path(out).write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")
