"""Images: in the question, and beside the tokens."""

import base64

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem

PIXEL = base64.b64encode(b"not much of an image").decode()


class ImagesEnv(BaseEnv):
    name = "images"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [APIServerConfig(model_name="scripted", api_key="x")]

    async def setup(self):
        self.seen = 0

    async def get_next_item(self):
        self.seen += 1
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            {"type": "text", "text": f"What is {self.seen} + 1?"},
        ]
        return ({"role": "user", "content": parts},), str(self.seen + 1), PIXEL

    async def collect_trajectory(self, item):
        chat, gold, image = item
        answer = await self.server.chat_completion(messages=list(chat), max_tokens=8)
        said = answer.choices[0].message.content
        ids = self.tokenizer.encode(f"{gold}? {said}", add_special_tokens=False)
        scored = ScoredDataItem()
        scored["tokens"], scored["masks"] = ids, [-100, *ids[1:]]
        scored["scores"] = 1.0 if said == gold else 0.0
        scored["images"] = image
        return scored, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    ImagesEnv.cli()
