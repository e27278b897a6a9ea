"""Which sequences run, and one step of all of them.

A step admits waiting sequences that fit, computes their prompts, gives every running sequence one token, and releases
those that ended. The scheduler owns the model, the cache and the sampler; it knows no threads and no HTTP.

Prompts that share a prefix with earlier sequences are not computed from the start (see `PrefixCache`). New weights drop
everything computed with the old ones: a running sequence keeps its tokens, and its next step computes them anew, so
that every token is sampled from one set of weights over its whole context.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from headrace.engine.cache import BLOCK_TOKENS, PrefixCache
from headrace.engine.model import EngineModel
from headrace.engine.sampler import LOWEST_LOGPROB, Sampler
from headrace.engine.sequence import Candidates, EngineSequence

log = logging.getLogger(__name__)

#: Prompt tokens, padding included, that are computed at once.
PREFILL_TOKENS = 4096
#: Tokens that are scored at once: each has the log-probs of a whole vocabulary.
SCORE_TOKENS = 1024
DEFAULT_VERSION = "default"


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What an engine holds, in bytes; `prefix_cache_tokens` is the number of cached tokens."""

    weights: int
    kv_cache: int
    prefix_cache: int
    prefix_cache_limit: int
    prefix_cache_tokens: int


class Scheduler:
    """Holds the running, waiting and held-back sequences; a step gives each running one a token."""

    def __init__(
        self, model: EngineModel, sampler: Sampler, *, max_num_seqs: int, max_model_len: int, prefix_bytes: int = 0
    ) -> None:
        self.model, self.sampler = model, sampler
        self.max_num_seqs = max_num_seqs
        self.version = DEFAULT_VERSION
        #: Nothing is stepped.
        self.paused = False
        #: What comes now waits for `resume`; what was there before goes on to its end.
        self.draining = False
        self.held: list[EngineSequence] = []
        self.waiting: deque[EngineSequence] = deque()
        #: Row i of the cache belongs to running[i].
        self.running: list[EngineSequence] = []
        self.prefix_bytes = prefix_bytes
        self._cache = model.cache(max_num_seqs, max_model_len)
        self._prefix = PrefixCache(self._cache.shape, size=prefix_bytes, dtype=model.dtype, device=model.device)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return not self.paused and bool(self.running or self.waiting)

    @property
    def unfinished(self) -> list[EngineSequence]:
        return [*self.running, *self.waiting, *self.held]

    def add(self, sequences: Iterable[EngineSequence]) -> None:
        """Queues new sequences; while a drain is under way they are held back."""
        (self.held if self.draining else self.waiting).extend(sequences)

    def pause(self, mode: str) -> list[EngineSequence]:
        """Pauses: at once, with what runs frozen (`keep`) or ended (`abort`), or once everything has ended by itself
        (`wait`).

        Returns what was ended. With `wait`, `paused` follows `draining` in the step that ends the last sequence.
        """
        if mode == "wait":
            self.draining = not self.paused
            self._drained()
            return []
        self.paused = True
        self._open()
        return self.abort(lambda _: True) if mode == "abort" else []

    def resume(self) -> None:
        """Ends a pause, and queues what was held back."""
        self.paused = False
        self._open()

    def _open(self) -> None:
        self.draining = False
        self.waiting.extend(self.held)
        self.held = []

    def _drained(self) -> None:
        if self.draining and not self.running and not self.waiting:
            self.paused = True
            self._open()

    def abort(self, gone: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Ends the sequences for which `gone` is true, with the tokens they have; returns them. Where there is no
        memory to keep what was computed for them, everything computed is dropped: the others go on from their tokens.
        """
        ended = [sequence for sequence in self.unfinished if gone(sequence)]
        for sequence in ended:
            sequence.finish("abort")
        running = list(self.running)
        try:
            with torch.inference_mode():  # a cache that grew in a step can be written to only so
                self._release()
        except Exception:
            log.exception("the prefixes of aborted sequences could not be kept; what runs is computed again")
            self.running = running
            self.forget()
        self.waiting = deque(sequence for sequence in self.waiting if sequence.finish_reason is None)
        self.held = [sequence for sequence in self.held if sequence.finish_reason is None]
        self._drained()
        return ended

    def fail(self, error: str) -> list[EngineSequence]:
        """Ends every running sequence with an error; returns them."""
        self._prefix.clear()
        ended, self.running = self.running, []
        for sequence in ended:
            sequence.fail(error)
            sequence.row = None
        self._drained()
        return ended

    def load(self, tensors: Mapping[str, torch.Tensor], version: str | None = None) -> None:
        """Loads new weights, drops the caches, and sets the version where one is given. Raises `BadWeights` and changes
        nothing."""
        self.model.weights.load(tensors)
        self.forget()
        if version is not None:
            self.version = version

    def forget(self) -> None:
        """Drops all computed keys and values; running sequences continue from their tokens."""
        self._prefix.clear()
        for sequence in self.running:
            sequence.row = None
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    def memory(self) -> EngineMemory:
        return EngineMemory(
            weights=self.model.size * self.model.dtype.itemsize,
            kv_cache=self._cache.held_bytes,
            prefix_cache=self._prefix.held_bytes,
            prefix_cache_limit=self.prefix_bytes,
            prefix_cache_tokens=len(self._prefix) * BLOCK_TOKENS,
        )

    def score(self, ids: list[int]) -> list[float]:
        """The log-prob of each token but the first, at temperature 1.

        It works while paused and beside running sequences, with a cache of its own that is dropped afterwards.
        """
        with torch.inference_mode():
            cache = self.model.cache(1, len(ids))
            cache.reserve(1, len(ids))
            tokens = torch.tensor(ids, device=self.model.device)
            found: list[float] = []
            for done in range(0, len(ids) - 1, SCORE_TOKENS):
                part = tokens[done : min(done + SCORE_TOKENS, len(ids) - 1)]
                states = self.model.forward(cache, slice(0, 1), part, [done], [len(part)])
                logprobs = self.model.logits(states).log_softmax(-1)
                next_ones = tokens[done + 1 : done + 1 + len(part), None]
                found += logprobs.gather(-1, next_ones)[:, 0].clamp(min=LOWEST_LOGPROB).tolist()
        return found

    def step(self) -> list[EngineSequence]:
        """Gives every running sequence one more token; returns them, in the order in which they ran."""
        with torch.inference_mode():
            return self._step()

    def _step(self) -> list[EngineSequence]:
        old = len(self.running)
        new = self._admit()
        logits = []
        if old:
            logits.append(self._decode(self.running[:old]))
        if new:
            logits.extend(self._prefill(new))
        batch = list(self.running)
        if not batch:
            return batch
        found = self.sampler(logits[0] if len(logits) == 1 else torch.cat(logits), batch)
        for at, sequence in enumerate(batch):
            wanted = sequence.sampling.logprobs
            if wanted is not None:
                assert found.ranks is not None
                first = (found.tokens[at], found.logprobs[at], found.ranks[at])
                top: Candidates = []
                if wanted and found.top_tokens is not None and found.top_logprobs is not None:
                    top = list(zip(found.top_tokens[at], found.top_logprobs[at], range(1, wanted + 1), strict=False))
                sequence.candidates.append([first, *(entry for entry in top if entry[0] != first[0])])
            sequence.push(found.tokens[at], found.logprobs[at], self.version)
        self._release()
        self._drained()
        return batch

    def _admit(self) -> list[EngineSequence]:
        new: list[EngineSequence] = []
        room = self.max_num_seqs - len(self.running)
        rows: list[int] = []
        at: list[int] = []
        found: list[int] = []
        while self.waiting and len(new) < room:
            sequence = self.waiting.popleft()
            new.append(sequence)
            # The last token is always computed: what follows it is asked for. So are prompts whose log-probs are.
            told = sequence.sampling.prompt_logprobs is not None
            sequence.blocks = [] if told else self._prefix.find(sequence.tokens(), sequence.length - 1)
        # Neighbours of like length waste the least padding.
        new.sort(key=_left)
        for sequence in new:
            sequence.row = len(self.running)
            self.running.append(sequence)
            rows += [sequence.row] * len(sequence.blocks)
            at += range(0, BLOCK_TOKENS * len(sequence.blocks), BLOCK_TOKENS)
            found += sequence.blocks
        if self.running:
            self._cache.reserve(len(self.running), max(sequence.length for sequence in self.running))
        if found:
            self._cache.fill(rows, at, self._prefix.get(found))
        return new

    def _release(self) -> None:
        """Frees the rows of sequences that ended; the last rows move into the gaps."""
        running = self.running
        ended = [sequence for sequence in running if sequence.finish_reason is not None]
        if ended:
            self._keep(ended)
        for sequence in ended:
            hole, sequence.row = sequence.row, None
            last = running.pop()
            if last is not sequence:
                assert hole is not None
                if last.finish_reason is None:
                    self._cache.move(len(running), hole, last.length)
                running[hole] = last
                last.row = hole

    def _keep(self, ended: list[EngineSequence]) -> None:
        """Puts the computed prefixes of these sequences into the prefix cache."""
        kept: dict[int, tuple[int, int]] = {}
        for sequence in ended:
            assert sequence.row is not None
            # The last token was sampled, not yet read. A place given twice belongs to who got it last.
            for block, at in self._prefix.place(sequence.tokens()[:-1]).items():
                kept[block] = (sequence.row, at * BLOCK_TOKENS)
        if kept:
            rows = [row for row, _ in kept.values()]
            self._prefix.put(list(kept), self._cache.take(rows, [at for _, at in kept.values()], BLOCK_TOKENS))

    def _decode(self, batch: list[EngineSequence]) -> torch.Tensor:
        ids = torch.tensor([sequence.output[-1] for sequence in batch], device=self.model.device)
        start = [sequence.length - 1 for sequence in batch]
        return self.model.logits(self.model.forward(self._cache, slice(0, len(batch)), ids, start, [1] * len(batch)))

    def _prefill(self, new: list[EngineSequence]) -> list[torch.Tensor]:
        """The logits after each new sequence's last token; several sequences at a time, very long ones in several
        passes."""
        logits, at = [], 0
        while at < len(new):
            end = at + 1
            while end < len(new) and (end + 1 - at) * _left(new[end]) <= PREFILL_TOKENS:
                end += 1
            logits.append(self._prefill_alike(new[at:end]))
            at = end
        return logits

    def _prefill_alike(self, batch: list[EngineSequence]) -> torch.Tensor:
        model, first = self.model, batch[0].row
        assert first is not None
        start = [BLOCK_TOKENS * len(sequence.blocks) for sequence in batch]
        tokens = [sequence.tokens()[known:] for sequence, known in zip(batch, start, strict=True)]
        states: list[list[torch.Tensor]] = [[] for _ in batch]
        asked = [sequence.sampling.prompt_logprobs is not None and not sequence.prompt_candidates for sequence in batch]
        for done in range(0, len(tokens[-1]), PREFILL_TOKENS):
            # Shorter ones come first, so those that go on are at the end.
            left = [at for at, row in enumerate(tokens) if len(row) > done]
            parts = [tokens[at][done : done + PREFILL_TOKENS] for at in left]
            ids = torch.tensor([token for part in parts for token in part], device=model.device)
            rows = slice(first + left[0], first + len(batch))
            new = [len(part) for part in parts]
            found = model.forward(self._cache, rows, ids, [start[at] + done for at in left], new)
            for at, state in zip(left, found.split(new), strict=True):
                states[at] = [*states[at], state] if asked[at] else [state[-1:]]
        for at, sequence in enumerate(batch):
            if asked[at]:
                self._tell(sequence, torch.cat(states[at]))
        return model.logits(torch.cat([parts[-1][-1:] for parts in states]))

    def _tell(self, sequence: EngineSequence, states: torch.Tensor) -> None:
        """Stores the log-probs of a prompt's own tokens, of each but the first."""
        wanted = sequence.sampling.prompt_logprobs
        assert wanted is not None
        sequence.prompt_candidates.append(None)
        for done in range(0, len(sequence.prompt) - 1, SCORE_TOKENS):
            own = sequence.prompt[done + 1 : done + 1 + SCORE_TOKENS]
            logprobs = self.model.logits(states[done : done + len(own)]).log_softmax(-1)
            chosen = logprobs.gather(-1, torch.tensor(own, device=logprobs.device)[:, None])
            ranks = (logprobs >= chosen).sum(-1).tolist()
            top = logprobs.clamp(min=LOWEST_LOGPROB).topk(wanted, -1)
            likely, values = top.indices.tolist(), top.values.tolist()
            for at, (token, value) in enumerate(zip(own, chosen[:, 0].clamp(min=LOWEST_LOGPROB).tolist(), strict=True)):
                rest = zip(likely[at], values[at], range(1, wanted + 1), strict=True)
                sequence.prompt_candidates.append(
                    [(token, value, ranks[at]), *(entry for entry in rest if entry[0] != token)]
                )


def _left(sequence: EngineSequence) -> int:
    """How many tokens of a new sequence must be computed."""
    return sequence.length - BLOCK_TOKENS * len(sequence.blocks)
