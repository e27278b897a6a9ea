"""`atroposlib.utils.tokenize_for_trainer`: a conversation as tokens, with labels for what is trained on.

It tokenises text again, which may give other tokens than the model sampled: where the server reports them,
`self.server.managed_server` gives the sampled tokens, with their log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MASKED = -100
UNMASKED_ROLES = ["assistant", "agent"]


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Any],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """`tokens` and `masks` of a conversation: its last message is trained on, or every answer. Where an answer was cut
    off at its length, its end mark is left out: the model did not sample it."""
    tokens = _ids(tokenizer, chat)
    if train_on_all_assistant_turns:
        masks = [MASKED] * len(tokens)
        for at, message in enumerate(chat):
            if message["role"] not in UNMASKED_ROLES:
                continue
            begin, said = len(_ids(tokenizer, chat[:at], prompt=True)), _ids(tokenizer, chat[: at + 1])
            masks[begin : len(said)] = said[begin:]
    else:
        begin = len(_ids(tokenizer, chat[:-1], prompt=True))
        masks = [MASKED] * begin + tokens[begin:]
    if finish_reason == "length" and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    return {"tokens": tokens, "masks": masks} | ({"messages": chat} if include_messages else {})


def _ids(tokenizer: Any, chat: Sequence[Any], *, prompt: bool = False) -> list[int]:
    found = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=prompt, return_dict=False)
    return [int(token) for token in found]
