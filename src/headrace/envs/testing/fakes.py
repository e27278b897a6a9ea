"""Stand-ins for a model, its tokenizer, its server and a trainer, which need no network."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson

from headrace.data.errors import InvalidInput
from headrace.data.scored import read_group, read_groups
from headrace.envs.api_client import ApiClient, ApiRefused
from headrace.envs.server.api_server import APIServer
from headrace.envs.server.config import APIServerConfig, ReasoningConfig
from headrace.envs.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionMessage,
    CompletionChoice,
    CompletionUsage,
    TextCompletion,
    TokensAndLogprobs,
    plain_json,
)
from headrace.extras import require

#: Names of a call's length limit, as environments give it.
LENGTH_NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens")
ENV_ID = 0
#: Sequences of a batch: so many that the queue never holds work.
BATCH_SIZE = 1 << 20
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def byte_tokenizer() -> Any:
    """A tokenizer that needs no hub: one token per byte, and ChatML turns. Raises `MissingExtra` where the libraries
    that read it are not installed."""
    require("tokens")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


#: The answer to all the text that was asked so far; it may be drawn with the random generator.
Say = Callable[[str, random.Random], str]


class FakeModel:
    """Answers by `say`, deterministically: the generator is seeded by `seed`, the prompt, and how often it was asked.

    An answer is cut at `max_tokens`, or ends with the end-of-turn token.
    """

    def __init__(self, say: Say, tokenizer: Any, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.said: list[str] = []
        self._say, self._seed = say, seed
        self._asked: Counter[str] = Counter()

    def answer(self, asked: str, kwargs: dict[str, Any]) -> tuple[list[int], str, str]:
        """Ids, text and finish reason of the answer."""
        self._asked[asked] += 1
        chance = random.Random(f"{self._seed}/{self._asked[asked]}/{asked}")
        return self.spoken(self._say(asked, chance), kwargs)

    def spoken(self, text: str, kwargs: dict[str, Any]) -> tuple[list[int], str, str]:
        """Ids, text and finish reason of a given text as an answer."""
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        most = next((kwargs[name] for name in LENGTH_NAMES if kwargs.get(name)), None)
        ended = "stop"
        if most is not None and len(ids) > most:
            ids, ended = ids[:most], "length"
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        self.said.append(text)
        return ids, text, ended


class FakeModelServer(APIServer):
    """A rollout server without HTTP: the model answers in this process."""

    def __init__(
        self, model: FakeModel, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config, reasoning_config)
        self.model = model
        self.tokenizing.use(model.tokenizer)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        messages = plain_json(kwargs["messages"])
        asked = "\n".join(f"{message['role']}: {message.get('content')}" for message in messages)
        answers = [self.model.answer(asked, kwargs) for _ in range(kwargs.get("n") or 1)]
        choices = [
            ChatChoice(index=at, message=ChatCompletionMessage(content=text), finish_reason=ended)
            for at, (_, text, ended) in enumerate(answers)
        ]
        sampled = sum(len(ids) for ids, _, _ in answers)
        usage = CompletionUsage(prompt_tokens=len(asked), completion_tokens=sampled, total_tokens=len(asked) + sampled)
        return ChatCompletion(model=self.config.model_name, choices=choices, usage=usage)

    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion:
        answers = [self.model.answer(str(kwargs["prompt"]), kwargs) for _ in range(kwargs.get("n") or 1)]
        choices = [
            CompletionChoice(index=at, text=text, finish_reason=ended) for at, (_, text, ended) in enumerate(answers)
        ]
        return TextCompletion(model=self.config.model_name, choices=choices)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        ids = kwargs.get("input_ids")
        prompt = self.tokenizing.prompt_ids(kwargs["prompt"]) if ids is None else [int(token) for token in ids]
        asked = str(self.model.tokenizer.decode(prompt))
        answers = [self.model.answer(asked, kwargs) for _ in range(kwargs.get("n") or 1)]
        log_probs = [[-(at % 7 + 1) / 8 for at in range(len(sampled))] for sampled, _, _ in answers]
        return prompt, [sampled for sampled, _, _ in answers], log_probs, [ended for _, _, ended in answers]


class FakeTrainer(ApiClient):
    """A trainer behind a Trajectory API, without HTTP: every group is a step, and it is done after `steps`.

    Groups are validated as the API does; `refused` holds the reasons of those that it would not have taken.
    """

    def __init__(self, steps: int) -> None:
        super().__init__("http://trainer.invalid")
        self.steps = steps
        self.received: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.left = False

    async def get(self, path: str, body: Any = None) -> dict[str, Any]:
        """What the API would answer to a GET; every group that came in is a step."""
        answers: dict[str, dict[str, Any]] = {
            "/info": {"batch_size": BATCH_SIZE, "max_token_len": -1},
            "/wandb_info": {"group": None, "project": None},
            "/status-env": {
                "current_step": len(self.received) + len(self.refused),
                "queue_size": 0,
                "self_queue_size": 0,
                "max_group_size": 1,
                "env_weight": 1.0,
                "unallocated_fraction": 1.0,
            },
        }
        return answers[path]

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        """What the API would answer to a registration or a goodbye."""
        if path == "/disconnect-env":
            self.left = True
            return {"status": "success"}
        return {
            "status": "success",
            "env_id": ENV_ID,
            "wandb_name": f"{body['desired_name']}_0",
            "checkpoint_dir": "",
            "starting_step": 0,
            "checkpoint_interval": -1,
            "num_steps": self.steps,
        }

    async def post_groups(self, path: str, body: bytes, key: str) -> dict[str, Any]:
        """Takes groups, or raises `ApiRefused` for those that the API would not take."""
        many = path == "/scored_data_list"
        try:
            read_groups(body) if many else read_group(body)
        except InvalidInput as error:
            self.refused.append(str(error))
            raise ApiRefused(str(error)) from error
        groups = orjson.loads(body)
        self.received += groups if many else [groups]
        return {"status": "received"}
