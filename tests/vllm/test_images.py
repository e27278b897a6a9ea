"""A gateway in front of a real vLLM that takes images: what it records is what vLLM consumed, sampled and looked at.

A witness between the two keeps vLLM's answers; transformers computes the log-probs of every recorded token anew, from
the images that the step holds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.gateway.images.kit import FAMILY, PAD, image_url, picture, text
from tests.gateway.kit import Json, Running, running_gateway, told, tree
from tests.gateway.rollout import chat, content_of, uid_of
from tests.vllm import vision
from tests.vllm.kit import TOLERANCE
from tests.vllm.server import vllm
from tests.vllm.witness import Witness, witnessed
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

from headrace import DataPool, Step
from headrace.tokens.vocabulary import load_vocabulary

#: A vLLM of its own, which takes the better part of a minute to start.
pytestmark = pytest.mark.long

CAT, DOG = picture(3, 2, seed=1), picture(1, 2, seed=2, kind="WEBP")


class Eyes:
    """The model as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._pad = load_vocabulary(folder).id_of(PAD)

    def log_probs(self, step: Step, files: list[bytes]) -> np.ndarray[Any, Any]:
        """Those of a step's response, had these been its images."""
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        seen = self._processor(images=images, return_tensors="pt")
        ids = torch.tensor([[*step.prompt_ids.tolist(), *step.response_ids.tolist()]])
        with torch.no_grad():
            found = self._model(input_ids=ids, mm_token_type_ids=(ids == self._pad).int(), **seen)
        values = torch.log_softmax(found.logits[0].float(), -1)
        start = len(step.prompt_ids)
        return values[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].numpy()


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("sighted")
    vision.build(found)
    return found


@pytest.fixture(scope="module")
def eyes(sighted: Path) -> Eyes:
    return Eyes(sighted)


@pytest.fixture(scope="module")
def watched(sighted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Witness]]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with vllm(sighted, log, variables=vision.variables()) as address, witnessed(address) as found:
        yield found


@pytest.fixture
def witness(watched: tuple[str, Witness]) -> Witness:
    """What vLLM does during this test."""
    watched[1].forget()
    return watched[1]


@pytest.fixture
def gateway(watched: tuple[str, Witness], witness: Witness, sighted: Path) -> Iterator[Running]:
    with DataPool() as pool, running_gateway(pool, watched[0], sighted, renderer=FAMILY) as found:
        yield found


def files_of(step: Step) -> list[bytes]:
    assert step.multi_modal_data is not None
    return [each["data"] for each in step.multi_modal_data["images"]]


@pytest.mark.parametrize("stream", [False, True])
def test_steps_hold_what_vllm_consumed_and_its_log_probs_are_those_of_their_images(
    gateway: Running, witness: Witness, eyes: Eyes, stream: bool
) -> None:
    base = gateway.init()["base_url"]
    messages: list[Json] = []
    for turn, content in enumerate(
        ([text("number"), image_url(CAT), text("higher?")], [image_url(DOG), image_url(CAT)], "lower?")
    ):
        messages.append({"role": "user", "content": content})
        answer = chat(gateway, base, messages, stream=stream, max_tokens=12, seed=turn)
        assert answer.status_code == 200, answer.text
        said = content_of(answer.text) if stream else told(answer)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
    steps = gateway.steps(uid_of(base))
    assert tree(steps) == [None, 0, 1]
    witness.holds(steps)
    for step, files in zip(steps, ([CAT], [CAT, DOG, CAT], [CAT, DOG, CAT]), strict=True):
        assert step.quarantined is None
        assert files_of(step) == files
        assert step.rollout_log_probs is not None
        assert np.abs(eyes.log_probs(step, files) - step.rollout_log_probs).max() < TOLERANCE
        other = [picture(3, 2, seed=7), *files[1:]]
        assert np.abs(eyes.log_probs(step, other) - step.rollout_log_probs).max() > 20 * TOLERANCE
