"""A game in steps: each step is a group of alternatives with advantages, of which the best is played."""

from typing import List, Optional, Tuple

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.type_definitions import Item, Message
from atroposlib.utils.advantages import allclose_to_first, compute_discounted_returns
from atroposlib.utils.best_of_n_selection import select_best_index
from atroposlib.utils.message_history_utils import strip_thinking
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class StepwiseEnv(BaseEnv):
    name = "stepwise"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [APIServerConfig(model_name="scripted", api_key="x")]

    async def setup(self):
        self.games = 0

    async def get_next_item(self) -> Item:
        self.games += 1
        return {"seed": self.games}

    async def collect_trajectories(self, item: Item) -> Tuple[List[Optional[ScoredDataGroup]], List[Item]]:
        history: List[Message] = [{"role": "system", "content": "You add."}]
        groups: List[Optional[ScoredDataGroup]] = []
        for step in range(2):
            history.append({"role": "user", "content": f"What is {item['seed']} + {step}?"})
            answer = await self.server.chat_completion(messages=history, n=self.config.group_size, max_tokens=32)
            said = [choice.message.content for choice in answer.choices]
            right = str(item["seed"] + step)
            rewards = [[float(strip_thinking(one).strip() == right), 0.5] for one in said]
            scores = [float(compute_discounted_returns(reward, 0.9)[0]) for reward in rewards]
            chats = [[*history, {"role": "assistant", "content": one}] for one in said]
            made = [tokenize_for_trainer(self.tokenizer, chat, train_on_all_assistant_turns=True) for chat in chats]
            best = select_best_index(scores, [len(one["tokens"]) for one in made])
            groups.append(
                ScoredDataGroup(
                    tokens=[one["tokens"] for one in made],
                    masks=[one["masks"] for one in made],
                    scores=scores,
                    advantages=[[score] * len(one["tokens"]) for score, one in zip(scores, made)],
                    messages=chats,
                    overrides=[{"step": step, "same": bool(allclose_to_first(rewards))} for _ in said],
                )
            )
            history.append({"role": "assistant", "content": said[best]})
        groups.append(None)
        return groups, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    StepwiseEnv.cli()
