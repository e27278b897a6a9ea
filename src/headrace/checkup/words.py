"""What ids say, from a tokenizer here or from a server that can tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.checkup.target import Target


class Words:
    """Reads ids with the tokenizer in a folder, else with a server's `/detokenize`, as vLLM has it, else not at all."""

    def __init__(self, target: Target, tokenizer: Path | None) -> None:
        self._target = target
        self._vocabulary = None
        if tokenizer is not None:
            from headrace.tokens.vocabulary import load_vocabulary

            self._vocabulary = load_vocabulary(tokenizer)

    async def read(self, ids: Sequence[int]) -> str | None:
        if self._vocabulary is not None:
            return self._vocabulary.decode(list(ids))
        found = await self._target.told("/detokenize", {"model": self._target.model, "tokens": list(ids)})
        text = found.get("prompt") if isinstance(found, dict) else None
        return text if isinstance(text, str) else None
