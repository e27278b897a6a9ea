"""`tree_vs_packed`: tokens/s of learning where each shared token is computed once, over the same sequences packed.

Three shapes. Two are eight sequences that share a prompt, forward and backward through the small Llama of `packing`:
2,048 tokens and 1,024 of their own each, and 12,288 and 2,048 (a coding agent), all divided by what keeps a CPU's time
short. The third is a step of the demo with its own model and learner, optimizer
included: games that all begin with the same prompt, and of which many go on alike. The tokens of the sequences are
counted on both sides, not those that are computed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.timing import in_turn, median, seconds
from headrace.bench.trainer import packing
from headrace.bench.trainer.plain import PlainLoop
from headrace.data.sequence import Sequence
from headrace.demo.model import build
from headrace.demo.recipe import RECIPES, trainer_config
from headrace.demo.tasks import TASKS
from headrace.trainer import attention
from headrace.trainer.backends import Packed, PackedBackend
from headrace.trainer.config import TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.prefix_tree import SharingRule

#: By the figure's name: tokens that eight sequences share, and tokens of each alone.
SHAPES = {"tree_vs_packed": (2048, 1024), "tree_vs_packed_long": (12288, 2048)}
DEMO = "tree_vs_packed_demo"
SEQUENCES = 8
#: Where the demo's learner would find pool and gateway, which it does not ask for here.
NOWHERE = "http://127.0.0.1:9"

Sides = tuple[Callable[[], object], Callable[[], object]]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SharingLoad:
    """What lengths are divided by, and how often each side is timed."""

    divisor: int = 8
    rounds: int = 3
    demo_rounds: int = 9
    model: packing.PackingLoad = packing.FULL


FULL = SharingLoad()
QUICK = SharingLoad(divisor=32)


def tree_vs_packed(load: SharingLoad = FULL) -> dict[str, float]:
    """For each shape, medians over rounds in turn: the figure by its name, and both sides' tokens/s."""
    found: dict[str, float] = {}
    for name, (shared, own) in SHAPES.items():
        found |= _timed(name, *_passes(shared // load.divisor, own // load.divisor, load), load.rounds)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        found |= _timed(DEMO, *_demo(Path(scratch)), load.demo_rounds)
    return found


def _timed(name: str, sides: Sides, tokens: int, rounds: int) -> dict[str, float]:
    tree, packed = sides
    tree_s, packed_s = in_turn(lambda: seconds(tree), lambda: seconds(packed), rounds)
    shape = name.removeprefix("tree_vs_packed")
    return {
        name: median(packed_s) / median(tree_s),
        f"tree{shape}_tokens_s": tokens / median(tree_s),
        f"unshared{shape}_tokens_s": tokens / median(packed_s),
    }


def _passes(shared: int, own: int, load: SharingLoad) -> tuple[Sides, int]:
    """One pass over all sequences by each side."""
    rng = np.random.default_rng(load.model.seed)
    prompt = rng.integers(0, packing.VOCABULARY, shared)
    answers = rng.integers(0, packing.VOCABULARY, (SEQUENCES, own))
    sequences = [
        _sequence(np.concatenate([prompt, answer]), np.arange(shared + own) >= shared, np.zeros(shared + own), 1.0, at)
        for at, answer in enumerate(answers)
    ]
    model = packing.model_of(load.model, attention.register())
    tree = PackedBackend(sharing=SharingRule.on("cpu")).convert(sequences)
    packed = PackedBackend().convert(sequences)

    def side(row: Packed) -> Callable[[], None]:
        return lambda: packing.learn(model, [row], packing.packed_loss)

    return (side(tree), side(packed)), SEQUENCES * (shared + own)


def _demo(scratch: Path) -> tuple[Sides, int]:
    """A step of the demo's first games by each side's learner."""
    recipe, folder = RECIPES["number"], build(scratch / "model", 0)
    loop = PlainLoop(recipe, TASKS["number"], folder, 0)
    played = loop.play(loop.model)
    advantages = played.rewards.view(-1, recipe.rollouts) - played.rewards.view(-1, recipe.rollouts).mean(1, True)
    sequences = []
    for at, advantage in enumerate(advantages.flatten().tolist()):
        end = int(played.sampled[at].nonzero().max()) + 1
        ids, mask, log_probs = (x[at, :end].numpy() for x in (played.ids, played.sampled, played.log_probs))
        sequences.append(_sequence(ids, mask, log_probs, advantage, at))

    def side(share: bool) -> Callable[[], object]:
        given = trainer_config(recipe, model=folder, run=scratch, pool=NOWHERE, gateway=NOWHERE, seed=0, steps=1)
        given["optimizer"]["share_prefixes"] = share
        learner = Learner(TrainerConfig(**given), "cpu")
        return lambda: learner.learn(sequences, 0, 0)

    return (side(True), side(False)), recipe.epochs * sum(map(len, sequences))


def _sequence(ids: Array, mask: Array, log_probs: Array, advantage: float, at: int) -> Sequence:
    return Sequence(
        tokens=ids.astype(np.int32),
        loss_mask=mask,
        log_probs=log_probs.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        trajectory_uid=f"t{at}",
        prompt_uid="p",
        reward=0.0,
        spans=(),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
    )
