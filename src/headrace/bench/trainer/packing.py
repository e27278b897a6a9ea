"""`packed_vs_padded`: tokens/s of a forward and backward pass over packed sequences, and over padded ones.

The same sequences, of lengths drawn log-uniform from 32 to 2,048 tokens, through the same small Llama; the loss is the
sum of log-probs. Both sides take the sequences as they come and cut them into micro-batches of at most so many places:
packed, a place is a token; padded, as one does it without packing, every row is as long as the micro-batch's longest.
The tokens of the sequences are counted, never the padding. The padded side has transformers' own attention (`sdpa`),
which gets the mask that padding needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.bench.timing import in_turn, median, seconds
from headrace.data.sequence import Sequence
from headrace.trainer import attention
from headrace.trainer.backends import Packed, PackedBackend, Padded, PaddedBackend

VOCABULARY = 512
SHORTEST, LONGEST = 32, 2048


@dataclass(frozen=True, slots=True)
class PackingLoad:
    """The sequences and the model. Lengths and model belong to the meaning of the figure; rounds only make medians
    steadier."""

    sequences: int = 24
    places: int = 8192
    layers: int = 4
    width: int = 256
    heads: int = 4
    rounds: int = 3
    seed: int = 0


FULL = PackingLoad()
QUICK = PackingLoad(sequences=12)


def packed_vs_padded(load: PackingLoad = FULL) -> dict[str, float]:
    """Medians over rounds in turn: `packed_tokens_s`, `padded_tokens_s` and the one over the other."""
    sequences = _sequences(load)
    tokens = sum(len(sequence) for sequence in sequences)
    packed = [PackedBackend().convert(part) for part in _parts(sequences, load.places, _in_a_row)]
    padded = [PaddedBackend(pad_id=0).convert(part) for part in _parts(sequences, load.places, _in_rows)]
    ours, theirs = model_of(load, attention.register()), model_of(load, "sdpa")

    def learn_packed(parts: list[Packed] = packed) -> None:
        learn(ours, parts, packed_loss)

    def learn_padded(parts: list[Padded] = padded) -> None:
        learn(theirs, parts, _padded_loss)

    learn_packed(packed[:1])  # a whole round to warm up would take long
    learn_padded(padded[:1])
    packed_s, padded_s = in_turn(lambda: seconds(learn_packed), lambda: seconds(learn_padded), load.rounds, warm_up=0)
    return {
        "packed_tokens_s": tokens / median(packed_s),
        "padded_tokens_s": tokens / median(padded_s),
        "packed_vs_padded": median(padded_s) / median(packed_s),
    }


def _sequences(load: PackingLoad) -> list[Sequence]:
    """Sequences of random lengths; the last half of each is trained on."""
    rng = np.random.default_rng(load.seed)
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), load.sequences)).astype(int)
    found = []
    for at, length in enumerate(lengths.tolist()):
        mask = np.arange(length) >= length // 2
        tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
        zeros, versions = np.zeros(length, np.float32), np.where(mask, 0, -1).astype(np.int32)
        found.append(Sequence(tokens, mask, zeros, versions, f"t{at}", f"p{at}", 0.0, ()))
    return found


def _in_a_row(lengths: list[int]) -> int:
    return sum(lengths)


def _in_rows(lengths: list[int]) -> int:
    return len(lengths) * max(lengths)


def _parts(sequences: list[Sequence], places: int, size: Callable[[list[int]], int]) -> Iterator[list[Sequence]]:
    """Micro-batches of at most so many token positions, in the order of the sequences."""
    part: list[Sequence] = []
    for sequence in sequences:
        if part and size([len(each) for each in (*part, sequence)]) > places:
            yield part
            part = []
        part.append(sequence)
    yield part


def model_of(load: PackingLoad, attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(load.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=load.width,
        intermediate_size=3 * load.width,
        num_hidden_layers=load.layers,
        num_attention_heads=load.heads,
        num_key_value_heads=load.heads,
        max_position_embeddings=LONGEST,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).train()


def learn(model: Any, parts: list[Any], loss: Callable[[Any, Any], torch.Tensor]) -> None:
    model.zero_grad()
    for part in parts:
        loss(model, part).backward()


def packed_loss(model: Any, part: Packed) -> torch.Tensor:
    states = model.model(
        input_ids=part.ids[None], position_ids=part.positions[None], cuts=part.cuts, tree=part.tree, use_cache=False
    ).last_hidden_state[0]
    return _loss(model.lm_head(states[part.states]), part.target_ids)


def _padded_loss(model: Any, part: Padded) -> torch.Tensor:
    states = model.model(
        input_ids=part.ids, attention_mask=part.attention_mask, position_ids=part.positions, use_cache=False
    ).last_hidden_state
    return _loss(model.lm_head(states[:, :-1][part.loss_mask[:, 1:]]), part.ids[part.loss_mask])


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
