"""gpt-oss by its library: `openai_harmony` wants a vocabulary file of its own and would fetch it from the network.

The file holds the same tokens as the model's tokenizer, so it is written from that into the user's cache.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.data.errors import InvalidInput
from headrace.files import cache_folder
from headrace.tokens.vocabulary import BYTE_OF, Vocabulary

HARMONY_FAMILY = "gpt-oss"
#: Where the library looks for its file before it asks the network, and the file's name.
HARMONY_FOLDER, HARMONY_FILE = "TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken"


@contextmanager
def own_harmony_vocabulary(vocabulary: Vocabulary) -> Iterator[None]:
    """Within, the library finds its vocabulary file; one that the environment names is left as it is.

    Raises InvalidInput, with what to do, where the library cannot be loaded nevertheless.
    """
    given = os.environ.get(HARMONY_FOLDER)
    folder = Path(given) if given else _written(vocabulary)
    os.environ[HARMONY_FOLDER] = str(folder)
    try:
        from openai_harmony import HarmonyError

        try:
            yield
        except HarmonyError as error:
            raise InvalidInput(
                f"the renderer {HARMONY_FAMILY} needs {HARMONY_FILE}, which openai_harmony could not load from {folder}"
                f" ({error}); set {HARMONY_FOLDER} to a folder that has it, or take --renderer template"
            ) from error
    finally:
        if given is None:
            os.environ.pop(HARMONY_FOLDER, None)


def _written(vocabulary: Vocabulary) -> Path:
    """The folder of a vocabulary file with the tokenizer's own tokens, in the order of their ids."""
    folder = cache_folder() / "harmony"
    file = folder / HARMONY_FILE
    if file.exists():
        return folder
    lines = []
    special = min(vocabulary.added, default=vocabulary.size)
    for token_id in range(special):
        token = vocabulary.hf.convert_ids_to_tokens(token_id)
        if token is None or any(char not in BYTE_OF for char in token):
            break  # not the vocabulary that the library expects; it says so itself
        lines.append(f"{base64.b64encode(vocabulary.bytes_of([token_id])).decode()} {token_id}\n")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text("".join(lines))
        scratch.replace(file)
    return folder
