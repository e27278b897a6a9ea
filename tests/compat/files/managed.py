"""A managed conversation of two turns: tokens, masks and log-probs as the server had them."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.envs.server_handling.managed_server import SequenceNode


class ManagedEnv(BaseEnv):
    name = "managed"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [APIServerConfig(model_name="scripted", api_key="x")]

    async def setup(self):
        self.asked = 0

    async def get_next_item(self):
        self.asked += 1
        return {"a": self.asked}

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            chat = [{"role": "user", "content": f"What is {item['a']} + 1?"}]
            for turn in range(2):
                answer = await managed.chat_completion(messages=chat, n=1, max_tokens=16, temperature=1.0)
                chat.append({"role": "assistant", "content": answer.choices[0].message.content})
                if turn == 0:
                    chat.append({"role": "user", "content": f"And what is {item['a']} + 2?"})
            node: SequenceNode = managed.get_state()["nodes"][-1]
        return (
            ScoredDataItem(
                tokens=node.tokens,
                masks=node.masked_tokens,
                inference_logprobs=node.logprobs,
                scores=float(chat[1]["content"] == str(item["a"] + 1)),
                messages=chat,
            ),
            [],
        )

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    ManagedEnv.cli()
