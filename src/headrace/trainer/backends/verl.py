"""verl's `DataProto`, as verl's own rollout gives it to its trainer.

A row is a Sequence, parted before its first target: what precedes is the prompt, padded on its left to `prompt_length`;
the rest is the response, padded on its right to `response_length`. What stands between the answers of a multi-turn
response is context, and 0 in `response_mask`. A Sequence that fits in neither is left out and counted. The fields of
the dataset's row and what the reward was made of stand in `non_tensor_batch`; a name of verl's own goes before.

What an environment said about tokens (`Sequence.guidance`) stands where verl looks for its own: `advantages` and
`returns`, `ref_log_prob`, `teacher_ids` and `teacher_logprobs`, each where it is known of every row. verl's trainer
computes advantages anew: `keep_given_advantages` lays those that were given over them, of some rows or of all.

verl is imported when the first batch is converted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.data.guidance import NO_TOKEN
from headrace.data.sequence import Sequence
from headrace.data.step import REWARD_INFO, check_count
from headrace.pool.batch import Batch
from headrace.trainer.backends.tensors import (
    TrainingBackend,
    sequences_in,
    targets_of,
    temperatures_of,
)
from headrace.trainer.examples import guided, rewards_at

if TYPE_CHECKING:
    from verl import DataProto

#: The tensor with the advantages that were given: NaN at the targets of rows of which none were.
GIVEN_ADVANTAGES = "given_advantages"
#: A teacher's log-prob where a row of candidates has ended: a probability of 0. Finite, for verl multiplies the two.
NO_CANDIDATE = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class VerlRow:
    """A Sequence with the targets as its loss mask, and the index at which its response begins."""

    sequence: Sequence
    first: int


class VerlBackend(TrainingBackend["DataProto"]):
    """For a verl trainer of `world_size` processes, which share a batch's rows evenly.

    Rows that nothing is learned from are added until they can: two tokens of `pad_id` each, with a zero mask, no reward
    and a `uid` of their own, so that they change no group.
    """

    def __init__(self, prompt_length: int, response_length: int, pad_id: int, world_size: int = 1) -> None:
        self.prompt_length = check_count(prompt_length, "prompt_length", 1)
        self.response_length = check_count(response_length, "response_length", 1)
        self.pad_id = check_count(pad_id, "pad_id")
        self.world_size = check_count(world_size, "world_size", 1)

    def convert(self, batch: Batch | Iterable[Sequence]) -> DataProto:
        """The batch as a `DataProto`; `meta_info["headrace"]` counts the sequences that were skipped, the rows that
        were added and, by name, those whose guidance was left out since other rows have none. Raises `HeadraceError`
        without verl, and `InvalidInput` where the sequences have several temperatures."""
        try:
            from verl import DataProto
        except ImportError as error:
            raise HeadraceError(f"verl cannot be imported ({error}): pip install 'verl>=0.9,<0.10'") from error
        found = [_row(sequence) for sequence in sequences_in(batch)]
        rows = [row for row in found if row is not None and self._fits(row)]
        added = -len(rows) % self.world_size
        guidance, left_out = self._guidance(rows, added)
        tensors = {**self._tensors(rows, added), **guidance}
        reward_parts = _reward_parts(rows, added)
        fields = {**_row_fields(rows, added), **reward_parts, **_about(rows, added)}
        return DataProto.from_dict(
            tensors={name: torch.from_numpy(array) for name, array in tensors.items()},
            non_tensors={name: values for name, values in fields.items() if name not in tensors},
            meta_info={
                "temperature": _temperature(rows),
                "reward_extra_keys": [name for name in reward_parts if name not in tensors],
                "headrace": {"skipped": len(found) - len(rows), "padding_rows": added, "left_out": left_out},
            },
        )

    def _fits(self, row: VerlRow) -> bool:
        return row.first <= self.prompt_length and len(row.sequence) - row.first <= self.response_length

    def _tensors(self, rows: list[VerlRow], added: int) -> dict[str, npt.NDArray[Any]]:
        shape = len(rows) + added, self.prompt_length + self.response_length
        cut = self.prompt_length
        ids = np.full(shape, self.pad_id, np.int64)
        real, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        log_probs, scores = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for at, row in enumerate(rows):
            sequence, start = row.sequence, cut - row.first
            here = (at, slice(start, start + len(sequence)))
            ids[here], real[here], mask[here] = sequence.tokens, 1, sequence.loss_mask
            log_probs[here] = np.where(sequence.loss_mask, sequence.log_probs, 0)
            scores[here] = rewards_at(sequence)
        real[len(rows) :, cut - 1 : cut + 1] = 1  # no row may be empty
        found: dict[str, npt.NDArray[Any]] = {
            "prompts": ids[:, :cut],
            "responses": ids[:, cut:],
            "input_ids": ids,
            "attention_mask": real,
            "position_ids": np.maximum(real.cumsum(1) - 1, 0),
            "response_mask": mask[:, cut:],
        }
        # Like verl's own rollout: what is not known of every row is not there, and verl computes it itself.
        if not np.isnan(log_probs).any():
            found["rollout_log_probs"] = log_probs[:, cut:]
        if all(row.sequence.reward is not None for row in rows):
            found["rm_scores"] = found["token_level_scores"] = scores[:, cut:]
        return {name: np.ascontiguousarray(array) for name, array in found.items()}

    def _guidance(self, rows: list[VerlRow], added: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
        """What is said of the rows' tokens, by verl's names, and how many rows said what cannot be told verl: it takes
        a reference's or a teacher's log-probs of all rows or of none."""
        given = self._given_advantages(rows, added)
        found = {}
        if rows and not np.isnan(given).any():
            found["advantages"] = found["returns"] = given
        if any(not np.isnan(given[at]).any() for at in range(len(rows))):
            found[GIVEN_ADVANTAGES] = given
        said = [row.sequence.guidance for row in rows]
        referred = [one.ref_log_probs for one in said if one is not None and one.ref_log_probs is not None]
        taught = [one for one in said if one is not None and one.teacher_ids is not None]
        left_out = {}
        if referred and len(referred) == len(rows):
            found["ref_log_prob"] = self._response(rows, referred, added)
        elif referred:
            left_out["ref_log_prob"] = len(referred)
        if taught and len(taught) == len(rows):
            found |= self._teacher(rows, added)
        elif taught:
            left_out["teacher_logprobs"] = len(taught)
        return found, left_out

    def _given_advantages(self, rows: list[VerlRow], added: int) -> npt.NDArray[np.float32]:
        """Those that came with each row, or that it has already; NaN at the targets of a row without any."""
        sequences = [row.sequence for row in rows]
        own = [np.full(len(s), np.nan, np.float32) if s.advantages is None else s.advantages for s in sequences]
        return self._response(rows, map(guided, sequences, own), added)

    def _response(self, rows: list[VerlRow], values: Iterable[npt.NDArray[Any]], added: int) -> npt.NDArray[np.float32]:
        """Of each row's values, one a token, those of its response: 0 where there is no target."""
        found = np.zeros((len(rows) + added, self.response_length), np.float32)
        for at, (row, each) in enumerate(zip(rows, values, strict=True)):
            response = slice(row.first, None)
            found[at, : len(each) - row.first] = np.where(row.sequence.loss_mask, each, 0)[response]
        return found

    def _teacher(self, rows: list[VerlRow], added: int) -> dict[str, npt.NDArray[Any]]:
        """A teacher's candidates, over prompt and response, as verl asks its own for them: what stands at a token is
        about the one that follows."""
        said = [row.sequence.guidance for row in rows]
        width = max(one.teacher_ids.shape[1] for one in said if one is not None and one.teacher_ids is not None)
        shape = len(rows) + added, self.prompt_length + self.response_length, width
        ids = np.full(shape, self.pad_id, np.int64)
        log_probs = np.full(shape, NO_CANDIDATE, np.float32)
        for at, (row, one) in enumerate(zip(rows, said, strict=True)):
            if one is not None and one.teacher_ids is not None and one.teacher_log_probs is not None:
                start, columns = self.prompt_length - row.first, one.teacher_ids.shape[1]
                here = (at, slice(start, start + len(row.sequence) - 1), slice(columns))
                real = one.teacher_ids[1:] != NO_TOKEN
                ids[here] = np.where(real, one.teacher_ids[1:], self.pad_id)
                log_probs[here] = np.maximum(one.teacher_log_probs[1:], NO_CANDIDATE)
        return {"teacher_ids": ids, "teacher_logprobs": log_probs}


def keep_given_advantages(data: DataProto) -> DataProto:
    """The same batch, to be called when verl has computed its advantages: those that came with a row stand in their
    place, and 0 where its environment said so. `returns`, which a critic learns, are left as they are."""
    if GIVEN_ADVANTAGES in data.batch:
        given = data.batch[GIVEN_ADVANTAGES]
        data.batch["advantages"] = torch.where(torch.isnan(given), data.batch["advantages"], given)
    return data


def _row(sequence: Sequence) -> VerlRow | None:
    """A sequence as a row; None where nothing in it is trained on, it holds images, or what was said about its tokens
    cannot be meant for them."""
    mask = targets_of(sequence)
    misfit = sequence.guidance is not None and sequence.guidance.misfit
    if sequence.multi_modal_data is not None or misfit:
        return None
    return VerlRow(replace(sequence, loss_mask=mask), int(mask.argmax())) if mask.any() else None


def _temperature(rows: list[VerlRow]) -> float:
    """The one temperature by which verl divides the logits of the whole batch."""
    found = {float(t) for row in rows for t in temperatures_of(row.sequence)[row.sequence.loss_mask]}
    if len(found) > 1:
        raise InvalidInput(
            f"a batch for verl has one temperature; these sequences were sampled at {shown(sorted(found))}. "
            "Force one at the gateway (--sampling train:temperature=1)"
        )
    return found.pop() if found else 1.0


def _about(rows: list[VerlRow], added: int) -> dict[str, npt.NDArray[Any]]:
    """verl's non-tensor fields, one entry for each row. verl groups rows by `uid`, which is the prompt's."""
    versions = [row.sequence.versions[row.sequence.loss_mask] for row in rows] + [np.zeros(1, np.int32)] * added
    turns = [sum(span.trained for span in row.sequence.spans) for row in rows] + [0] * added
    names = [f"padding-{number}" for number in range(added)]
    return {
        "uid": _objects([*(row.sequence.prompt_uid for row in rows), *names]),
        "trajectory_uid": _objects([*(row.sequence.trajectory_uid for row in rows), *names]),
        "min_global_steps": _objects([int(each.min()) for each in versions]),
        "max_global_steps": _objects([int(each.max()) for each in versions]),
        "multi_modal_inputs": _objects([{} for _ in versions]),
        "__num_turns__": np.array(turns, np.int32),
    }


def _row_fields(rows: list[VerlRow], added: int) -> dict[str, npt.NDArray[Any]]:
    """The fields of the dataset's rows, which trajectories carry as metadata (`data_source`, `extra_info`, ...), and
    `reward_extra_info`: None where a row has no such field."""
    told = [row.sequence.metadata for row in rows]
    names = dict.fromkeys(name for metadata in told for name in metadata)
    return {name: _objects([*(metadata.get(name) for metadata in told), *[None] * added]) for name in names}


def _reward_parts(rows: list[VerlRow], added: int) -> dict[str, npt.NDArray[Any]]:
    """What the rewards were made of, by name, as verl's own rollout lays it down: what is known of every row."""
    infos = [row.sequence.metadata.get(REWARD_INFO) for row in rows]
    found = [info for info in infos if isinstance(info, dict)]
    if not found or len(found) < len(infos):
        return {}
    names = [name for name in found[0] if all(name in info for info in found)]
    return {name: _objects([*(info[name] for info in found), *[None] * added]) for name in names}


def _objects(values: list[Any]) -> npt.NDArray[np.object_]:
    found = np.empty(len(values), object)
    found[:] = values
    return found
