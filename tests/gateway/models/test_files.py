"""The file of models: three ways to write the same, and nothing in it that is passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.files import read
from headrace.gateway import Settings
from headrace.gateway.config_files import read_models

YAML = """
default: small
models:
  small: {addresses: ["http://a:1", "http://b:1"], tokenizer: /models/small}
  judge:
    mode: pass
    addresses: https://example.test/v1
    pattern: [gpt-*, "o?"]
"""
TOML = """
default = "small"
[models.small]
addresses = ["http://a:1", "http://b:1"]
tokenizer = "/models/small"
[models.judge]
mode = "pass"
addresses = "https://example.test/v1"
pattern = ["gpt-*", "o?"]
"""


def written(folder: Path, models: dict[str, Any], **more: Any) -> Path:
    path = folder / "models.json"
    path.write_text(json.dumps({"models": models, **more}))
    return path


def test_yaml_json_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(YAML)
    (tmp_path / "m.toml").write_text(TOML)
    (tmp_path / "m.json").write_text(json.dumps(read(tmp_path / "m.yaml")))
    found = [read_models(tmp_path / name) for name in ("m.yaml", "m.toml", "m.json")]
    assert found[0] == found[1] == found[2]
    assert found[0].models["small"].servers == ["http://a:1", "http://b:1"]
    assert found[0].models["judge"].patterns == ["gpt-*", "o?"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.yaml", "models:\n  a: {served: x}\n  a: {served: y}\n"),
        ("m.yaml", "models:\n  a: {served: x, served: y}\n"),
        ("m.json", '{"models": {"a": {"served": "x", "served": "y"}}}'),
        ("m.toml", "[models.a]\nserved = 'x'\nserved = 'y'\n"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=f"{name}.*(twice|overwrite)"):
        read_models(tmp_path / name)


PASS = {"mode": "pass", "addresses": "http://j:1"}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown key": (
        {"a": {"adresses": "http://a:1"}},
        {},
        "models.a: key 'adresses' is unknown; did you mean addr",
    ),
    "unknown at the top": ({}, {"defualt": "a"}, "'defualt' is unknown; did you mean default"),
    "unknown default": ({"alpha": {}}, {"default": "alpa"}, "'alpa' is unknown; did you mean alpha"),
    "a default that is not trained": ({"a": {"mode": "record"}}, {"default": "a"}, "name one with mode train"),
    "no such mode": ({"a": {"mode": "tain"}}, {}, "models.a: Invalid enum value 'tain'"),
    "no address to pass to": ({"a": {"mode": "pass"}}, {}, "models.a: mode pass needs one address"),
    "two addresses to pass to": ({"a": {**PASS, "addresses": ["http://a:1", "http://b:1"]}}, {}, "needs one address"),
    "what says nothing of a pass": ({"a": {**PASS, "tokenizer": "x"}}, {}, "models.a: tokenizer says nothing"),
    "paths of what is recorded": ({"a": {"paths": "embeddings"}}, {}, "models.a: paths says nothing"),
    "a path out of the base": ({"a": {**PASS, "paths": ["ok", "../admin"]}}, {}, "models.a: paths holds '../admin'"),
    "a path with a query": ({"a": {**PASS, "paths": "score?x=1"}}, {}, "models.a: paths holds 'score?x=1'"),
    "a path that is encoded": ({"a": {**PASS, "paths": "a%2e%2e"}}, {}, "models.a: paths holds 'a%2e%2e'"),
    "no address": ({"a": {"addresses": "nowhere:x"}}, {}, "models.a: 'nowhere:x' is no server's address"),
    "a server twice": (
        {"a": {"addresses": ["a:1", "http://a:1/v1"]}},
        {},
        "addresses names http://a:1 twice",
    ),
    "two in one channel": ({"a": {"channel": "c"}, "b": {"channel": "c"}}, {}, "models.b: channel 'c' is that of 'a'"),
    "the default's channel": ({"a": {"channel": "train"}}, {}, "'train' is that of the model of --vllm-addresses"),
    "a key that is not set": ({"a": {"key_env": "HEADRACE_NO_SUCH"}}, {}, "models.a: key_env names HEADRACE_NO_SUCH"),
    "no table": ({"a": "http://a:1"}, {}, "models.a must be a table"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("models", "more", "said"), WRONG.values(), ids=WRONG)
def test_what_could_not_work_is_refused_by_its_place(
    tmp_path: Path, models: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_models(written(tmp_path, models, **more))
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("m.yaml", "models: [", "m.yaml cannot be read: "),
        ("m.json", "{", "m.json cannot be read: "),
        ("m.toml", "models", "m.toml cannot be read: "),
        ("m.yaml", "7", "must hold a mapping"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=said):
        read_models(tmp_path / name)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_models(tmp_path / "missing.yaml")


def test_an_address_needs_no_scheme(tmp_path: Path) -> None:
    spec = read_models(written(tmp_path, {"a": {"addresses": ["a:1", "https://b:2"]}})).models["a"]
    assert spec.changes()["vllm_addresses"] == "http://a:1,https://b:2"
    assert Settings(models=str(written(tmp_path, {"a": {"addresses": "a:1"}}, default="a"))).vllm_addresses is None


def test_flags_are_needed_only_for_what_the_file_leaves_open(tmp_path: Path) -> None:
    served = {"addresses": "http://a:1"}
    assert Settings(models=str(written(tmp_path, {"a": served}, default="a"))).vllm_addresses is None
    for models, default, said in (
        ({"a": served}, {}, "--vllm-addresses must be given, or a default in --models"),
        ({"a": {}}, {"default": "a"}, "--vllm-addresses must be given, or addresses of model 'a' in --models"),
    ):
        with pytest.raises(ValueError, match=said):
            Settings(models=str(written(tmp_path, models, **default)))
    with pytest.raises(ValueError, match="--vllm-addresses must be given"):
        Settings(tokenizer_path="x")
