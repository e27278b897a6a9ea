"""What a pool recorded, as samples to score: ids decoded, conversations as messages, the row's fields beside them.

Messages of a recorded trajectory are read back from its exact tokens: what was sampled by the model's own parser, and
what stood before and between by cutting it where the chat template writes its turns. Where a text does not follow the
template, it is one message of the user's, as text; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.data.sequence import Sequence as TokenSequence
from headrace.data.trajectory import Trajectory
from headrace.rewards.sample import RewardFailure, Sample
from headrace.tokens import Message, Renderer, text_of
from headrace.tokens.renderer import marker_ids
from headrace.tokens.split import PromptSplitter
from headrace.tokens.vocabulary import Vocabulary


class SampleReader:
    """Makes samples of what was recorded with one model's tokenizer. `ground_truth` names the field of the row that
    has it, where `Sample.of_row` would not find it."""

    def __init__(self, renderer: Renderer, ground_truth: str | None = None) -> None:
        self._renderer = renderer
        self._vocabulary = renderer.vocabulary
        self._splitter = PromptSplitter(renderer)
        self._ground_truth = ground_truth
        self._kept = marker_ids(self._vocabulary, renderer.grammar)

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's."""
        return self._vocabulary

    def outcome(self, trajectory: Trajectory) -> Sample | None:
        """A whole trajectory: its last path from beginning to end. None where nothing of it may be trained on."""
        sequences = trajectory.sequences()
        if not sequences:
            return None
        last = sequences[-1]
        begin, final = min(span.start for span in last.spans), last.spans[-1]
        return self._sample(
            trajectory,
            messages=self._conversation(last),
            text=self.text(last.tokens[final.start : final.end].tolist(), last.tokens[: final.start].tolist()),
            prompt_ids=last.tokens[:begin].tolist(),
            response_ids=last.tokens[begin:].tolist(),
            num_turns=len(last.spans),
        )

    def steps(self, trajectory: Trajectory) -> list[Sample]:
        """Every step that may be trained on, each with the conversation before it, by index."""
        found = []
        for step in trajectory.steps:
            if step.quarantined is None and step.trainable:
                prompt, response = step.prompt_ids.tolist(), step.response_ids.tolist()
                found.append(
                    self._sample(
                        trajectory,
                        messages=self.messages(prompt, [(len(prompt), len(prompt) + len(response))], prompt + response),
                        text=self.text(response, prompt),
                        prompt_ids=prompt,
                        response_ids=response,
                        step_index=step.step_index,
                    )
                )
        return found

    def samples(self, trajectory: Trajectory, *, by_step: bool) -> list[Sample]:
        """What of a trajectory is scored: its outcome, or each of its steps; at least one. Raises `RewardFailure` where
        there is nothing to score, or it cannot be read back."""
        try:
            outcome = None if by_step else self.outcome(trajectory)
            found = self.steps(trajectory) if by_step else [outcome] if outcome is not None else []
        except Exception as error:  # templates and parsers of strangers may raise anything, at this trajectory alone
            raise RewardFailure(f"it cannot be read back: {type(error).__name__}: {error}", again=False) from error
        if not found:
            raise RewardFailure("none of its steps may be trained on", again=False)
        return found

    def of_ids(self, prompt: Sequence[int], response: Sequence[int], row: Mapping[str, Any], **fields: Any) -> Sample:
        """One answer to a prompt, of which only the ids are known."""
        prompt, response = list(prompt), list(response)
        spans = [(len(prompt), len(prompt) + len(response))]
        return Sample.of_row(
            row,
            ground_truth=self._ground_truth,
            messages=self.messages(prompt, spans, prompt + response),
            text=self.text(response, prompt),
            prompt_ids=prompt,
            response_ids=response,
            **fields,
        )

    def unpadded(self, ids: Sequence[int], length: int | None, *, left: bool) -> list[int]:
        """Ids without their padding: those of `length` ids lose what the tokenizer pads with, on one side."""
        found, pad = list(ids), self._vocabulary.hf.pad_token_id
        if length is None or len(found) != length or pad is None:
            return found
        others = np.flatnonzero(np.asarray(found) != pad)
        if not len(others):
            return []
        return found[int(others[0]) :] if left else found[: int(others[-1]) + 1]

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text of an answer as it was written, reasoning and tool calls included, without the end of the turn."""
        return text_of(self._vocabulary, list(ids), keep=self._kept, prompt=prompt)

    def messages(
        self, prompt: Sequence[int], spans: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> list[dict[str, Any]]:
        """A run of ids as messages: `prompt`, then what was sampled in `spans` of it and what stands between these."""
        found = self._context(list(prompt), None)
        for at, (start, end) in enumerate(spans):
            found.append(self._answer(ids[:start], ids[start:end]))
            if at + 1 < len(spans):
                found += self._context(list(ids[start : spans[at + 1][0]]), end - start)
        return [_openai(message) for message in found]

    def _conversation(self, sequence: TokenSequence) -> list[dict[str, Any]]:
        ids = sequence.tokens.tolist()
        spans = [(span.start, span.end) for span in sequence.spans]
        return self.messages(ids[: spans[0][0]], spans, ids)

    def _context(self, ids: list[int], answered: int | None) -> list[Message]:
        """What others wrote; `answered`: the ids begin with an answer of so many."""
        found = self._splitter.split(ids, None if answered is None else "assistant")
        if found is not None:
            return found
        text = self._vocabulary.decode(ids[answered or 0 :], skip_special=True).strip()
        return [Message("user", text)] if text else []

    def _answer(self, before: Sequence[int], ids: Sequence[int]) -> Message:
        return self._renderer.parse(list(before), list(ids), tools=True).message

    def _sample(self, trajectory: Trajectory, **fields: Any) -> Sample:
        return Sample.of_row(
            trajectory.metadata,
            ground_truth=self._ground_truth,
            trajectory_uid=trajectory.uid,
            prompt_uid=trajectory.prompt_uid,
            **fields,
        )


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message of an assistant's; empty where there is none."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, list) else []
            return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
    return ""


def _openai(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API has it: arguments as text."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for call in message.tool_calls
        ]
    return found
