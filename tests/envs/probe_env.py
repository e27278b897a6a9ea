"""Environments whose rewards have something wrong with them, each by its name."""

import itertools

from headrace.envs import BaseEnv, ScoredDataItem

CALLS = itertools.count()


class Fair(BaseEnv):
    """The right answer in its tags counts."""

    name = "fair"

    async def setup(self):
        self.asked = 0

    async def get_next_item(self):
        self.asked += 1
        return {"question": f"What is {self.asked} + 1000?", "answer": str(self.asked + 1000)}

    def reward(self, said, item):
        return float(f"<answer>{item['answer']}</answer>" in said)

    async def collect_trajectory(self, item):
        chat = [{"role": "user", "content": f"{item['question']} Reply in <answer> </answer>."}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(messages=chat, max_tokens=8192)
            (node,) = managed.get_state()["nodes"]
        score = await self.scored(answer.choices[0].message.content, item)
        return ScoredDataItem(tokens=node.tokens, masks=node.masked_tokens, scores=score), []

    async def scored(self, said, item):
        return self.reward(said, item)

    async def evaluate(self, *args, **kwargs): ...


class Formal(Fair):
    """Any answer in its tags counts."""

    def reward(self, said, item):
        return float(said.startswith("<answer>"))


class Long(Fair):
    """The longer the better."""

    def reward(self, said, item):
        return len(said) / 1000


class Restless(Fair):
    """Never the same twice."""

    def reward(self, said, item):
        return super().reward(said, item) + next(CALLS)


class Flat(Fair):
    """All the same."""

    def reward(self, said, item):
        return 0.5


class Fragile(Fair):
    """Expects a word."""

    def reward(self, said, item):
        return super().reward(said, item) + 0 * len(said.split()[0])


class Judged(Fair):
    """A model says what an answer is worth, and is shown it as it is."""

    async def scored(self, said, item):
        ask = f"Rate this answer from 0 to 10 as 'Score: N'.\n\n{said}"
        verdict = await self.server.chat_completion(messages=[{"role": "user", "content": ask}])
        text = verdict.choices[0].message.content
        return float(text.partition("Score: ")[2].split()[0]) if "Score: " in text else 0.0


class Choosy(Fair):
    """A group at once, which is dropped where all of it earns the same."""

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": f"{item['question']} Reply in <answer> </answer>."}]
        answer = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=8192)
        said = [choice.message.content for choice in answer.choices]
        scores = [self.reward(one, item) for one in said]
        if len(set(scores)) == 1:
            return None, []
        ids = [self.tokenizer.encode(f"? {one}", add_special_tokens=False) for one in said]
        masks = [[-100, -100, *one[2:]] for one in ids]
        return {"tokens": ids, "masks": masks, "scores": scores}, []
