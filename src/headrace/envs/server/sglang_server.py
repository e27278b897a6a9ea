"""SGLang: OpenAI's routes for text, its own `/generate` for tokens."""

from __future__ import annotations

from typing import Any

from headrace.envs.server.answers import Tokens
from headrace.envs.server.errors import Unavailable
from headrace.envs.server.openai_server import LENGTH_NAMES, OpenAIServer, request_of


class SGLangServer(OpenAIServer):
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens:
        kwargs, options = request_of(kwargs)
        kwargs.pop("model", None)
        prompt = self._prompt(kwargs)
        if isinstance(prompt, str):
            prompt = self.tokenizing.prompt_ids(prompt)  # it tells what it sampled, not what it consumed
        for name in (*LENGTH_NAMES, "max_tokens"):
            if (value := kwargs.pop(name, None)) is not None:
                kwargs["max_new_tokens"] = value
        body = {"input_ids": prompt, "sampling_params": kwargs, "return_logprob": True}
        found = await self.http.post(f"{self.http.root}/generate", body, **options)
        answers = found if isinstance(found, list) else [found]
        if len(answers) != (kwargs.get("n") or 1):
            raise Unavailable(
                f"{self.http.root}/generate gave {len(answers)} answers where {kwargs.get('n', 1)} were asked"
            )
        return prompt, *self.sampled(_read(answer.get("meta_info") or {}) for answer in answers)


def _read(meta: dict[str, Any]) -> tuple[Any, Any, str]:
    rows = meta.get("output_token_logprobs")
    reason = meta.get("finish_reason")
    ended = str(reason.get("type") or "stop") if isinstance(reason, dict) else str(reason or "stop")
    if not isinstance(rows, list):
        return None, None, ended
    return [row[1] for row in rows], [row[0] for row in rows], ended
