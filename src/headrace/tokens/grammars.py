"""The grammar of a tokenizer's answers: learned from its chat template once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from headrace.files import cache_folder, write_whole
from headrace.tokens.infer import Inference, infer
from headrace.tokens.samples import Write
from headrace.tokens.vocabulary import Vocabulary

#: The files whose code decides what is learned.
CODE = (
    *("forms.py", "declared.py", "infer.py", "samples.py", "proof.py", "grammars.py"),
    *("parse.py", "answer.py", "bodies.py", "values.py", "channels.py", "jsontext.py"),
)


def learned(vocabulary: Vocabulary, template: str, options: Mapping[str, Any]) -> Inference:
    """What `template` shows of how answers are written, under template options; from the cache where it was asked
    before. Where there is no template, what the vocabulary's tokens tell."""
    kept = cache_folder() / "forms" / f"{_key(vocabulary, template, options)}.json"
    with suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(kept.read_bytes(), type=Inference)
    found = infer(writer(vocabulary, template, options), frozenset(vocabulary.added.values()), template)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, msgspec.json.encode(found))
    return found


def writer(vocabulary: Vocabulary, template: str, options: Mapping[str, Any]) -> Write:
    """Writes prompts by a chat template, from messages as they are."""
    program = compiled(template)
    special = dict(vocabulary.hf.special_tokens_map)

    def write(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool) -> str:
        if program is None:
            given = {"tools": tools, "tokenize": False, "add_generation_prompt": generate, **options}
            return str(vocabulary.hf.apply_chat_template(messages, chat_template=template, **given))
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generate}
        return str(program.render(**given, **{**special, **options}))

    return write


def compiled(template: str) -> Any:
    """The template as transformers compiles it, to call it without what it does around; None where that has moved."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        found = _compile_jinja_template(template)
    except ImportError:
        return None
    _find_keys_fast(found.environment)
    return found


#: Names that a dict has of its own: in a template they are that, and no key.
DICT_ATTRIBUTES = frozenset(dir(dict))
#: What a loop tells of itself.
LOOP_FACTS = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})


def _find_keys_fast(environment: Any) -> None:
    """Has `message.role` and `loop.first` in templates look in one place alone. Jinja's sandbox asks a dict for an
    attribute first, fails, and then finds the key; and it asks of what a loop tells whether it is safe to see, which it
    is: the same, at several times the cost, a dozen times a message."""
    from jinja2.runtime import LoopContext

    plain, undefined = environment.getattr, environment.undefined

    def find(obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in LOOP_FACTS:
            return getattr(obj, attribute)
        return plain(obj, attribute)

    if "getattr" not in vars(environment):  # transformers keeps what it compiled
        environment.getattr = find


def _key(vocabulary: Vocabulary, template: str, options: Mapping[str, Any]) -> str:
    """A digest of all that the result depends on: added tokens, template, options, and the code that learns."""
    parts = [repr(sorted(vocabulary.added.items())), template, repr(vocabulary.hf.special_tokens_map)]
    parts += [repr(sorted(options.items()))]
    parts += [f"{name} {version(name)}" for name in ("transformers", "jinja2")]
    parts += [Path(__file__).with_name(name).read_text() for name in CODE]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]
