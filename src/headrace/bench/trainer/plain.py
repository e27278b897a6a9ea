"""The demo without Headrace: one process that plays, learns and plays again, on the same model and the same ids.

    python -m headrace.bench.trainer.plain --seed 0 --games 256 --lr 1e-3

prints one JSON line. What the whole system costs is its time over this one's. All games of a step are sampled together,
turn by turn; the ids are those of the model's own chat template: a turn's prompt is the last prompt, what was sampled,
and whatever the template puts between two replies. With `--lag 1` a step's games are played with the weights of one
update before, as they are where player and learner work side by side.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from headrace.demo.tasks import TASKS
from headrace.engine import tiny

#: The reward that counts as learned, and how many steps it is the mean of.
BAR = 0.95
WINDOW = 10


@dataclass(frozen=True, slots=True)
class Options:
    """The hyper-parameters; the defaults are the demo's."""

    task: str = "number"
    seed: int = 0
    steps: int = 400
    games: int = 256
    group: int = 8
    lag: int = 0
    epochs: int = 1
    minibatches: int = 1
    lr: float = 1e-3
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy: float = 0.0
    grad_norm: float = 1.0
    advantage: str = "grpo"
    #: Factor on the initial weights of the output layer.
    head: float = 1.0


@dataclass(slots=True)
class Played:
    """The games of one step: `ids` is rectangular, and `targets` says which of its tokens were sampled in earnest."""

    ids: torch.Tensor
    targets: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor
    calls: int


@dataclass(slots=True)
class Run:
    options: Options
    model: Any
    opening: list[int]
    glue: dict[str, list[int]]
    guesses: dict[int, str]
    optimizer: torch.optim.Optimizer = field(init=False)
    rng: torch.Generator = field(init=False)
    group: int = 0
    updates: int = 0

    def __post_init__(self) -> None:
        options = self.options
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=0.0
        )
        self.rng = torch.Generator().manual_seed(options.seed)

    def logits(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state).float()

    @torch.no_grad()
    def play(self, model: Any) -> Played:
        """All games of one step, turn by turn."""
        options, task = self.options, TASKS[self.options.task]
        games = [
            task.game(options.seed, self.group + number)
            for number in range(options.games // options.group)
            for _ in range(options.group)
        ]
        self.group += options.games // options.group
        ids = torch.tensor([self.opening] * len(games))
        targets = torch.zeros_like(ids, dtype=torch.bool)
        log_probs = torch.zeros(ids.shape)
        going = torch.arange(len(games))
        calls = 0
        while len(going):
            calls += len(going)
            last = model.model(input_ids=ids[going], use_cache=False).last_hidden_state[:, -1]
            scores = functional.log_softmax(model.lm_head(last).float(), -1)
            sampled = torch.multinomial(scores.exp(), 1, generator=self.rng)
            more = torch.zeros((len(games), 1 + len(self.glue["lower"])), dtype=torch.long)
            more[going, 0] = sampled[:, 0]
            mask = torch.zeros(more.shape, dtype=torch.bool)
            mask[going, 0] = True
            found = torch.zeros(more.shape)
            found[going, 0] = scores.gather(1, sampled)[:, 0]
            for place, token in zip(going.tolist(), sampled[:, 0].tolist(), strict=True):
                games[place].reply(self.guesses.get(token, ""))
                if games[place].reward is None:
                    more[place, 1:] = torch.tensor(self.glue[games[place].messages[-1]["content"]])
            ids, targets, log_probs = (
                torch.cat([ids, more], 1),
                torch.cat([targets, mask], 1),
                torch.cat([log_probs, found], 1),
            )
            going = torch.tensor([place for place in going.tolist() if games[place].reward is None], dtype=torch.long)
        rewards = torch.tensor([game.reward for game in games])
        return Played(ids, targets, log_probs, rewards, calls)

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """One a game, from the games of its group."""
        groups = rewards.view(-1, self.options.group)
        centred = groups - groups.mean(1, keepdim=True)
        match self.options.advantage:
            case "grpo":
                centred = centred / (groups.std(1, keepdim=True) + 1e-6)
            case "batch":
                kept = groups.std(1) > 0
                if kept.any():
                    centred = centred / (centred[kept].std() + 1e-6)
        return centred.flatten()

    def learn(self, played: Played) -> dict[str, float]:
        """The epochs of one step; groups whose games all went alike have nothing to teach and are left out."""
        options = self.options
        advantages = self.advantages(played.rewards)
        kept = (advantages.view(-1, options.group) != 0).any(1).nonzero()[:, 0]
        if not len(kept):
            return {}
        clipped, entropies = [], []
        for _ in range(options.epochs):
            order = kept[torch.randperm(len(kept), generator=self.rng)]
            for part in torch.tensor_split(order, min(options.minibatches, len(order))):
                rows = (part[:, None] * options.group + torch.arange(options.group)).flatten()
                row, place = played.targets[rows].nonzero(as_tuple=True)
                length = int(place.max())
                hidden = self.model.model(input_ids=played.ids[rows][:, :length], use_cache=False).last_hidden_state
                scores = functional.log_softmax(self.model.lm_head(hidden[row, place - 1]).float(), -1)
                now = scores.gather(1, played.ids[rows[row], place][:, None])[:, 0]
                advantage = advantages[rows[row]]
                ratio = (now - played.log_probs[rows[row], place]).exp()
                bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
                loss = -torch.minimum(ratio * advantage, bounded * advantage).mean()
                entropy = -(scores.exp() * scores).sum(1).mean()
                (loss - options.entropy * entropy).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.grad_norm)
                self.updates += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = options.lr * min(1.0, self.updates / max(options.warmup, 1))
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                clipped.append(float((ratio * advantage > bounded * advantage).float().mean()))
                entropies.append(float(entropy.detach()))
        return {"clip": float(np.mean(clipped)), "entropy": float(np.mean(entropies)), "kept": len(kept)}


def prepare(options: Options) -> Run:
    """The model with this seed's weights, and the template's ids around replies."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = tiny.folder(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if options.head != 1.0:
        with torch.no_grad():
            model.lm_head.weight.mul_(options.head)

    def ids(*messages: str) -> list[int]:
        turns = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(messages)]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    opening = ids("guess")
    glue = {hint: ids("guess", "1", hint)[len(opening) + 1 :] for hint in ("higher", "lower")}
    guesses = {tokenizer.convert_tokens_to_ids(str(n)): str(n) for n in range(1, TASKS[options.task].numbers + 1)}
    return Run(options, model, opening, glue, guesses)


def train(options: Options, stop: bool = True) -> Iterator[dict[str, Any]]:
    """One record a step, until the bar is reached (or, without `stop`, for all steps)."""
    run = prepare(options)
    began = time.perf_counter()
    actors: deque[Any] = deque(maxlen=options.lag + 1)
    rewards: list[float] = []
    calls = 0
    for step in range(options.steps):
        actors.append(copy.deepcopy(run.model) if options.lag else run.model)
        played = run.play(actors[0])
        learned = run.learn(played)
        calls += played.calls
        rewards.append(float(played.rewards.mean()))
        mean = float(np.mean(rewards[-WINDOW:]))
        reached = mean >= BAR and len(rewards) >= WINDOW
        yield {
            "step": step,
            "games": (step + 1) * options.games,
            "calls": calls,
            "seconds": time.perf_counter() - began,
            "reward": rewards[-1],
            "mean": mean,
            "reached": reached,
            **learned,
        }
        if reached and stop:
            return


def summary(options: Options, stop: bool = True, limit_s: float = float("inf")) -> dict[str, Any]:
    """A whole run as one record: how much it took to reach the bar, and the curve."""
    records: list[dict[str, Any]] = []
    for record in train(options, stop):
        records.append(record)
        if record["seconds"] > limit_s:
            break
    at = next((record for record in records if record["reached"]), records[-1])
    return {
        "seed": options.seed,
        "reached": at["reached"],
        "steps": at["step"] + 1,
        "games": at["games"],
        "calls": at["calls"],
        "seconds": round(at["seconds"], 2),
        "reward_end": round(records[-1]["mean"], 4),
        "rewards": [round(record["reward"], 3) for record in records],
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.trainer.plain", description=__doc__)
    for option in fields(Options):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default)
    parser.add_argument("--go-on", action="store_true", help="play all steps, also after the bar was reached")
    parser.add_argument("--threads", type=int, default=1)
    given = vars(parser.parse_args(args))
    torch.set_num_threads(given.pop("threads"))
    go_on = given.pop("go_on")
    print(json.dumps(summary(Options(**given), stop=not go_on)))


if __name__ == "__main__":
    main()
