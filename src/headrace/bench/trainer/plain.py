"""The demo without Headrace: one process that plays, learns and plays again, with the same model, ids and recipe.

    python -m headrace.bench.trainer.plain --seed 0

prints one JSON line. What the whole system costs is its time over this one's. All games of a step are sampled together,
turn by turn; the ids are those of the model's own chat template: a turn's prompt is the last prompt, what was sampled,
and whatever the template puts between two replies. With `--lag 1` a step's games are played with the weights of one
update before, as they are where players and learner work side by side.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS, RECIPES, Recipe
from headrace.demo.tasks import TASKS, NumberTask
from headrace.run.progress import averaged


@dataclass(frozen=True, slots=True)
class TemplateIds:
    """The chat template's ids: up to the first reply, between two replies by the hint, and the guesses by their
    token."""

    opening: list[int]
    between: dict[str, list[int]]
    guesses: dict[int, str]

    @classmethod
    def of(cls, folder: Path, task: NumberTask) -> TemplateIds:
        """Reads them from the tokenizer of a checkpoint."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)

        def ids(*said: str) -> list[int]:
            turns = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(said)]
            return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

        first = task.game(0, 0).messages[0]["content"]
        opening = ids(first)
        between = {hint: ids(first, "1", hint)[len(opening) + 1 :] for hint in ("higher", "lower")}
        guesses = {int(tokenizer.convert_tokens_to_ids(str(n))): str(n) for n in range(1, task.numbers + 1)}
        return cls(opening, between, guesses)


@dataclass(slots=True)
class PlayedGames:
    """The games of one step, one in each row: `sampled` marks the sampled ids, `log_probs` has their log-probs."""

    ids: Tensor
    sampled: Tensor
    log_probs: Tensor
    rewards: Tensor

    @property
    def calls(self) -> int:
        return int(self.sampled.sum())


class PlainLoop:
    """Plays and learns; all randomness follows from the seed."""

    def __init__(self, recipe: Recipe, task: NumberTask, folder: Path, seed: int) -> None:
        from transformers import LlamaForCausalLM

        self.recipe, self.task, self.seed = recipe, task, seed
        self.words = TemplateIds.of(folder, task)
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0, fused=True
        )
        self._rng = torch.Generator().manual_seed(seed)
        self._groups = 0

    def play(self, model: Any) -> PlayedGames:
        """Plays all games of one step, turn by turn. A finished game continues as padding, which is ignored."""
        rollouts, groups = self.recipe.rollouts, range(self._groups, self._groups + self.recipe.groups)
        self._groups = groups.stop
        games = [self.task.game(self.seed, group) for group in groups for _ in range(rollouts)]
        length = 1 + len(self.words.between["lower"])
        ids = torch.tensor([self.words.opening] * len(games))
        sampled, log_probs = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
        while going := [at for at, game in enumerate(games) if game.reward is None]:
            with torch.inference_mode():
                last = model.model(input_ids=ids[going], use_cache=False).last_hidden_state[:, -1]
                scores = functional.log_softmax(model.lm_head(last), -1)
                tokens = torch.multinomial(scores.exp(), 1, generator=self._rng)
                found = scores.gather(1, tokens)[:, 0]
            more = torch.zeros((len(games), length), dtype=torch.long)
            mask, chosen = torch.zeros(more.shape, dtype=torch.bool), torch.zeros(more.shape)
            more[going, 0], mask[going, 0], chosen[going, 0] = tokens[:, 0], True, found
            for at, token in zip(going, tokens[:, 0].tolist(), strict=True):
                games[at].reply(self.words.guesses.get(token, ""))
                if games[at].reward is None:
                    more[at, 1:] = torch.tensor(self.words.between[games[at].messages[-1]["content"]])
            ids, sampled = torch.cat([ids, more], 1), torch.cat([sampled, mask], 1)
            log_probs = torch.cat([log_probs, chosen], 1)
        return PlayedGames(ids, sampled, log_probs, torch.tensor([game.reward for game in games]))

    def learn(self, played: PlayedGames) -> None:
        """The epochs of one step: GRPO's advantages, PPO's clipped loss, a mean over tokens."""
        recipe = self.recipe
        groups = played.rewards.view(-1, recipe.rollouts)
        centred = groups - groups.mean(1, keepdim=True)
        advantages = (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()
        kept = torch.arange(len(advantages))
        if recipe.skip_zero_variance:
            kept = kept[(groups.std(1) > 0).repeat_interleave(recipe.rollouts)]
        for _ in range(recipe.epochs if len(kept) else 0):
            for rows in torch.tensor_split(kept[torch.randperm(len(kept), generator=self._rng)], recipe.minibatches):
                row, place = played.sampled[rows].nonzero(as_tuple=True)
                hidden = self.model.model(input_ids=played.ids[rows, : int(place.max())], use_cache=False)
                scores = functional.log_softmax(self.model.lm_head(hidden.last_hidden_state[row, place - 1]), -1)
                tokens, old = played.ids[rows][row, place], played.log_probs[rows][row, place]
                ratio = (scores.gather(1, tokens[:, None])[:, 0] - old).exp()
                gain = advantages[rows][row]
                clipped = ratio.clamp(1 - recipe.clip, 1 + recipe.clip_high)
                entropy = -(scores.exp() * scores).sum(1)
                loss = -(torch.minimum(ratio * gain, clipped * gain) + recipe.entropy * entropy).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)

    def run(self, steps: int, lag: int = 0) -> Iterator[PlayedGames]:
        """Plays and learns step after step; yields the games of each."""
        players: deque[Any] = deque(maxlen=lag + 1)
        for _ in range(steps):
            players.append(copy.deepcopy(self.model) if lag else self.model)
            played = self.play(players[0])
            self.learn(played)
            yield played


def measure(recipe: Recipe, *, task: str = "number", seed: int = 0, lag: int = 0, model: Path | None = None) -> Any:
    """Runs until the moving average reaches the goal: the time it took, and the curve."""
    from headrace.demo.model import build

    with tempfile.TemporaryDirectory() as scratch:
        loop = PlainLoop(recipe, TASKS[task], model or build(Path(scratch) / "model", seed), seed)
    began = time.perf_counter()
    rewards: list[float] = []
    calls, learned = 0, False
    for played in loop.run(recipe.steps, lag):
        calls += played.calls
        rewards.append(float(played.rewards.mean()))
        learned = len(rewards) >= LEARNED_STEPS and averaged(rewards[-LEARNED_STEPS:])[-1] >= LEARNED_REWARD
        if learned:
            break
    return {
        "seed": seed,
        "learned": learned,
        "steps": len(rewards),
        "games": len(rewards) * recipe.groups * recipe.rollouts,
        "calls": calls,
        "seconds": round(time.perf_counter() - began, 2),
        "reward_end": round(averaged(rewards)[-1], 4),
        "rewards": [round(reward, 4) for reward in rewards],
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.trainer.plain", description="The demo, plain.")
    parser.add_argument("--task", default="number", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, default=0, help="updates that the players are behind")
    parser.add_argument("--model", type=Path, help="the checkpoint to begin with (default: the demo's, by the seed)")
    parser.add_argument("--threads", type=int, default=1)
    known = [field.name for field in fields(Recipe)]
    for name in known:
        kind = str if name == "advantage" else json.loads
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="in place of the recipe's")
    given = vars(parser.parse_args(args))
    torch.set_num_threads(given.pop("threads"))
    changes = {name: value for name in known if (value := given.pop(name)) is not None}
    print(json.dumps(measure(replace(RECIPES[given["task"]], **changes), **given)))


if __name__ == "__main__":
    main()
