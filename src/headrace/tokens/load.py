"""From a model's folder to its renderer."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from headrace.tokens.families import named_family, proven_family
from headrace.tokens.renderer import Renderer
from headrace.tokens.template import TemplateRenderer
from headrace.tokens.vocabulary import Vocabulary, load_vocabulary


def do_without_torch() -> None:
    """For a process that only tokenises, before it loads its first tokenizer: transformers would import torch for
    nothing, which takes seconds and 250 MB. Afterwards nothing in this process can import it."""
    for name in ("torch", "torchvision"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # not to be found
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def load_renderer(source: str | Path | Vocabulary, family: str = "auto") -> Renderer:
    """The renderer for the tokenizer in a folder.

    `auto` takes the family of `renderers` that is proven to write what the model's template writes, and the template
    itself where none is; `template` takes the template; anything else is the name of a family, taken on trust.
    """
    vocabulary = source if isinstance(source, Vocabulary) else load_vocabulary(source)
    if family not in ("auto", "template"):
        return named_family(family, vocabulary)
    template = TemplateRenderer(vocabulary)
    if family == "template":
        return template
    return proven_family(template) or template
