"""Single trajectories, with every optional field."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.type_definitions import Item


class SingleEnv(BaseEnv):
    name = "single"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [APIServerConfig(model_name="scripted", api_key="x")]

    async def setup(self):
        self.asked = 0

    async def get_next_item(self) -> Item:
        self.asked += 1
        return self.asked

    async def collect_trajectory(self, item: Item):
        messages = [{"role": "user", "content": f"What is {item} + {item}?"}]
        completion = await self.server.chat_completion(messages=messages, max_tokens=16)
        said = completion.choices[0].message.content
        prompt = self.tokenizer.encode(f"{item}:", add_special_tokens=False)
        answer = self.tokenizer.encode(said, add_special_tokens=False)
        tokens = prompt + answer
        return (
            ScoredDataItem(
                tokens=tokens,
                masks=[-100] * len(prompt) + answer,
                scores=float(said == str(2 * item)),
                advantages=[0.5] * len(tokens),
                ref_logprobs=[-0.25] * len(tokens),
                messages=[*messages, {"role": "assistant", "content": said}],
                group_overrides={"item": item},
                overrides={"set_advantage_to_zero": said != str(2 * item)},
                images=None,
                inference_logprobs=[1.0] * len(prompt) + [-0.5] * len(answer),
                generation_params={"max_tokens": 16},
                distill_token_ids=[[token, 1] for token in tokens],
                distill_logprobs=[[-0.125, -2.0] for _ in tokens],
            ),
            [],
        )

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    SingleEnv.cli()
