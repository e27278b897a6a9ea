"""What the engine computes is what transformers computes, alone or in company, in whatever pieces."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.kit import Client, Reference, gap

from headrace.data.errors import InvalidInput
from headrace.engine import scheduler as scheduling
from headrace.engine import tiny
from headrace.engine.model import EngineModel
from headrace.engine.sampler import Sampler
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import EngineSequence, OutputText, SamplingParams
from headrace.engine.tokenizer import EngineTokenizer

CLOSE = 1e-4


class Bench:
    """A scheduler without a server."""

    def __init__(self, folder: Path, *, processed: bool = False, **options: Any) -> None:
        self.tokenizer = EngineTokenizer(folder)
        self.model = EngineModel(folder, dtype=torch.float32, device=torch.device("cpu"))
        options = {"max_num_seqs": 16, "max_model_len": 512, "prefix_bytes": 1 << 24, **options}
        self.scheduler = Scheduler(self.model, Sampler(processed=processed), **options)

    def sequence(self, prompt: list[int], *, seed: int = 0, **asked: Any) -> EngineSequence:
        sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **asked})
        return EngineSequence(
            "r", 0, prompt, sampling, seed=seed, eos=frozenset([2]), text=OutputText(self.tokenizer.inner, prompt)
        )

    def run(self, *sequences: EngineSequence) -> None:
        self.scheduler.add(sequences)
        while self.scheduler.busy:
            self.scheduler.step()


def mixed(bench: Bench, count: int, seed: int = 0, **asked: Any) -> list[EngineSequence]:
    """Sequences of many lengths, some of which begin alike."""
    pick = random.Random(seed)
    stem = [pick.randrange(bench.model.vocabulary) for _ in range(40)]
    found = []
    for at in range(count):
        prompt = stem[: pick.randrange(0, 40)] + [
            pick.randrange(bench.model.vocabulary) for _ in range(pick.randrange(1, 60))
        ]
        found.append(bench.sequence(prompt, seed=at, max_tokens=pick.randrange(1, 24), **asked))
    return found


def test_log_probs_of_a_mixed_batch_are_those_of_a_full_forward_pass(folder: Path, reference: Reference) -> None:
    bench = Bench(folder)
    sequences = mixed(bench, 60)
    bench.run(*sequences)
    for sequence in sequences:
        assert len(sequence.output) == sequence.sampling.max_tokens
        assert gap(sequence.logprobs, reference.logprobs(sequence.prompt, sequence.output)) < CLOSE


def test_a_prefix_that_is_found_again_changes_nothing(folder: Path, reference: Reference) -> None:
    bench = Bench(folder)
    first = bench.sequence(list(range(50)), max_tokens=12)
    bench.run(first)
    again = [bench.sequence(first.tokens()[:cut], seed=cut) for cut in (1, 4, 5, 17, 49, 61)]
    bench.scheduler.add(again)
    bench.scheduler.step()
    assert any(sequence.blocks for sequence in again), "nothing was found again"
    bench.run()
    for sequence in again:
        assert gap(sequence.logprobs, reference.logprobs(sequence.prompt, sequence.output)) < CLOSE


def test_a_prefix_cache_that_is_always_full_changes_nothing(folder: Path, reference: Reference) -> None:
    bench = Bench(folder, prefix_bytes=3 * 2 * 2 * 96 * 4 * 4)
    sequences = mixed(bench, 30, seed=3)
    bench.run(*sequences)
    for sequence in sequences:
        assert gap(sequence.logprobs, reference.logprobs(sequence.prompt, sequence.output)) < CLOSE


def test_prompts_longer_than_a_pass_are_computed_in_pieces(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "PREFILL_TOKENS", 32)
    bench = Bench(folder)
    sequences = [bench.sequence([at % 300 for at in range(size)], seed=size) for size in (1, 31, 32, 33, 100)]
    sequences.append(bench.sequence([at % 300 for at in range(90)], prompt_logprobs=0))
    bench.run(*sequences)
    for sequence in sequences:
        assert gap(sequence.logprobs, reference.logprobs(sequence.prompt, sequence.output)) < CLOSE
    told = sequences[-1]
    found = [candidates[0][1] for candidates in told.prompt_candidates[1:] if candidates]
    assert gap(found, reference.logprobs(told.prompt[:1], told.prompt[1:])) < CLOSE


def test_greedy_answers_are_the_same_alone_and_in_company(folder: Path) -> None:
    together, alone = Bench(folder), Bench(folder, prefix_bytes=0)
    company = mixed(together, 20, seed=5, temperature=0.0)
    together.run(*company)
    for sequence in company:
        single = alone.sequence(sequence.prompt, max_tokens=sequence.sampling.max_tokens, temperature=0.0)
        alone.run(single)
        assert single.output == sequence.output
        assert gap(single.logprobs, sequence.logprobs) < CLOSE


def test_sampled_answers_depend_on_their_seed_and_not_on_their_company(folder: Path) -> None:
    together, alone = Bench(folder), Bench(folder)
    company = mixed(together, 20, seed=6)
    together.run(*company)
    for sequence in company:
        single = alone.sequence(sequence.prompt, seed=sequence.seed, max_tokens=sequence.sampling.max_tokens)
        alone.run(single)
        assert single.output == sequence.output


def test_new_weights_in_the_middle_are_those_of_every_later_token(
    folder: Path, other: Path, reference: Reference, other_reference: Reference
) -> None:
    from headrace.engine.weights import checkpoint

    bench = Bench(folder)
    sequences = [bench.sequence(list(range(size)), seed=size, max_tokens=10) for size in (3, 20)]
    bench.scheduler.add(sequences)
    for _ in range(4):
        bench.scheduler.step()
    bench.scheduler.load(checkpoint(other), "7")
    bench.run()
    for sequence in sequences:
        assert sequence.versions() == [
            {"version": "default", "start": 0, "end": 4},
            {"version": "7", "start": 4, "end": 10},
        ]
        before = reference.logprobs(sequence.prompt, sequence.output)[:4]
        after = other_reference.logprobs(sequence.prompt, sequence.output)[4:]
        assert gap(sequence.logprobs, before + after) < CLOSE


FAMILIES: dict[str, dict[str, Any]] = {
    "llama, tied, grouped heads": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 2},
    "llama with biases": {"model_type": "llama", "attention_bias": True},
    "llama with scaled rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
}


def family(folder: Path, into: Path, **changes: Any) -> Path:
    """A small random model of a family, with tiny's tokenizer, whose weights are far from their initial values."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = {**tiny.CONFIG, "vocab_size": len(tokenizer), "eos_token_id": 2, "pad_token_id": 0, **changes}
    given.pop("bos_token_id", None)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return into


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_computed_as_transformers_does(folder: Path, tmp_path: Path, name: str) -> None:
    made = family(folder, tmp_path / "model", **FAMILIES[name])
    bench, reference = Bench(made), Reference(made)
    sequences = mixed(bench, 12)
    bench.run(*sequences)
    for sequence in sequences:
        assert gap(sequence.logprobs, reference.logprobs(sequence.prompt, sequence.output)) < CLOSE


def test_a_family_that_is_not_computed_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    config = (folder / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "gpt2"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidInput, match="gpt2 model; the engine computes llama"):
        EngineModel(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_over_http_log_probs_are_those_of_a_full_forward_pass(engine: Client, reference: Reference) -> None:
    found = engine.complete("Guess a number from 1 to 7", max_tokens=20, seed=3, ignore_eos=True)
    expected = reference.logprobs(found["prompt_token_ids"], found["token_ids"])
    assert gap(found["logprobs"]["token_logprobs"], expected) < CLOSE
