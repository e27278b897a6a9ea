"""verl's `DataProto`, as verl's own rollout gives it to its trainer.

A row is a Sequence, parted before its first target: what precedes is the prompt, padded on its left to `prompt_length`;
the rest is the response, padded on its right to `response_length`. What stands between the answers of a multi-turn
response is context, and 0 in `response_mask`. A Sequence that fits in neither is left out and counted. The fields of
the dataset's row and what the reward was made of stand in `non_tensor_batch`; a name of verl's own goes before.

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
from headrace.data.sequence import Sequence
from headrace.data.step import REWARD_INFO, check_count
from headrace.pool.batch import Batch
from headrace.trainer.backends.tensors import (
    TrainingBackend,
    sequences_in,
    targets_of,
    temperatures_of,
)
from headrace.trainer.examples import rewards_at

if TYPE_CHECKING:
    from verl import DataProto


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
        """The batch as a `DataProto`; `meta_info["headrace"]` counts the sequences that were skipped and the rows that
        were added. Raises `HeadraceError` without verl, and `InvalidInput` where the sequences have several
        temperatures."""
        try:
            from verl import DataProto
        except ImportError as error:
            raise HeadraceError(f"verl cannot be imported ({error}): pip install 'verl>=0.9,<0.10'") from error
        found = [_row(sequence) for sequence in sequences_in(batch)]
        rows = [row for row in found if row is not None and self._fits(row)]
        added = -len(rows) % self.world_size
        tensors = self._tensors(rows, added)
        reward_parts = _reward_parts(rows, added)
        fields = {**_row_fields(rows, added), **reward_parts, **_about(rows, added)}
        return DataProto.from_dict(
            tensors={name: torch.from_numpy(array) for name, array in tensors.items()},
            non_tensors={name: values for name, values in fields.items() if name not in tensors},
            meta_info={
                "temperature": _temperature(rows),
                "reward_extra_keys": [name for name in reward_parts if name not in tensors],
                "headrace": {"skipped": len(found) - len(rows), "padding_rows": added},
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


def _row(sequence: Sequence) -> VerlRow | None:
    """A sequence as a row; None where nothing in it is trained on, or it holds images."""
    mask = targets_of(sequence)
    if sequence.multi_modal_data is not None:
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
