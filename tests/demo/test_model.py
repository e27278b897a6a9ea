"""The demo's checkpoint is what transformers would have written."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.demo.model import WORDS, build
from headrace.engine.words import HEAD_SPREAD, SPREAD


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("demo") / "model", seed=3)


def test_every_weight_of_a_llama_is_there_and_spread_as_it_should_be(folder: Path) -> None:
    model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about.values()), about
    for name, weight in model.state_dict().items():
        spread = 0.0 if "norm" in name else HEAD_SPREAD if name == "lm_head.weight" else SPREAD
        assert float(weight.std()) == pytest.approx(spread, rel=0.1), name


def test_a_word_is_a_token_and_the_template_frames_each_message(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert all(len(tokenizer.encode(word, add_special_tokens=False)) == 1 for word in WORDS)
    messages = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nguess\nassistant\n4\nassistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_seed_gives_the_same_weights_each_time(folder: Path, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    assert (build(tmp_path / "same", seed=3) / "model.safetensors").read_bytes() == weights
    assert (build(tmp_path / "other", seed=4) / "model.safetensors").read_bytes() != weights
