"""Checkpoints: all that a run needs to be resumed exactly, in an ordinary model folder that any server can load; with
LoRA, in a folder of an adapter as peft writes it.

A checkpoint is complete or absent: it is written to a temporary folder, synced, and renamed, and one in its place is
moved aside until then. It lists the batches that were learned from and not yet acknowledged, so that a resumed run does
not learn from them again.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.files import check_format, local_model_folder
from headrace.trainer.ranks import ALONE, Ranks
from headrace.trainer.sharded_state import read_state
from headrace.trainer.sync.weights import ADAPTER_FILE

log = logging.getLogger(__name__)

#: What a model folder has beside its weights.
COPIED_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json"),
)
#: What says that a folder holds a whole model, which an adapter's does not.
MODEL_CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHTS_FILE = "model.safetensors"
#: Endings of folders beside checkpoints, which begin with a dot: being written, moved aside for one of the same step,
#: being deleted.
PART, ASIDE, GONE = ".part", ".aside", ".gone"
#: The format of `progress.json` and of what stands beside it. A release that writes what this one would misread, or
#: forget, raises it; checkpoints from before it was told have the first.
FORMAT_VERSION = 1


class BadCheckpoint(HeadraceError, ValueError):
    """A checkpoint of which a file is missing or broken."""

    code = "bad_checkpoint"


class Progress(msgspec.Struct):
    """How far a run got; `progress.json` in a checkpoint."""

    step: int = 0
    #: What the weights were, or are to be, published as.
    version: int = 0
    #: Leases whose batches are learned from and not yet acknowledged, with the trajectories in them.
    leases: dict[str, list[str]] = {}
    #: Trajectories that were learned from and whose lease was lost: they will be handed out again.
    repeats: list[str] = []
    #: Batches, trajectories and tokens that were learned from since the run began.
    batches: int = 0
    trajectories: int = 0
    tokens: int = 0
    #: The mean rewards of the last steps, as many as `stop_window` asks for.
    rewards: list[float] = []
    #: Unix time of the run's first step, and seconds spent in it, over restarts.
    began: float = 0.0
    seconds: float = 0.0
    format_version: int = FORMAT_VERSION


class Checkpoints:
    """The checkpoints of one run, the newest `keep` of them. Configuration and tokenizer are copied from `files`:
    `model` itself, unless that is a hub name (`files_folder`).

    `adapter` is what `adapter_config.json` says where the weights are those of a LoRA adapter; None: of the model."""

    def __init__(self, run: Path, model: Path, keep: int, adapter: Mapping[str, Any] | None = None) -> None:
        self.folder, self._model, self._keep, self.adapter = run / "checkpoints", model, keep, adapter
        self.files = model

    def recover(self) -> None:
        """Undoes what a kill left half done: a checkpoint that was moved aside, and whose successor never came, is back
        in its place; all else that is no checkpoint is deleted. To be called before a run begins or goes on."""
        for left in sorted(self.folder.glob(".*")):
            place = self.folder / left.stem.removeprefix(".")
            if left.suffix == ASIDE and not place.exists():
                left.rename(place)
            elif left.suffix in (PART, ASIDE, GONE):
                shutil.rmtree(left)

    def save(
        self, progress: Progress, weights: Mapping[str, torch.Tensor], write_state: Callable[[Path], None]
    ) -> Path:
        """Writes and syncs the checkpoint of a step, deletes the oldest ones beyond `keep`, and returns its folder.
        `write_state` writes all that is not the policy's weights into a folder."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"{progress.step:08}"
        made = self._beside(place, PART)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in weights.items()}
        save_file(tensors, made / self._weights_file, {"format": "pt"})
        if self.adapter is not None:
            (made / "adapter_config.json").write_text(json.dumps(self.adapter, indent=2) + "\n")
        write_state(made)
        (made / "progress.json").write_bytes(msgspec.json.encode(progress))
        for name in COPIED_FILES:
            if self.adapter is not None and name in MODEL_CONFIG_FILES:
                continue
            if (self.files / name).exists():
                shutil.copyfile(self.files / name, made / name)
        for file in made.rglob("*"):
            _sync(file)
        _sync(made)
        aside = self._beside(place, ASIDE)
        if place.exists():  # of a run that was resumed from an earlier one
            place.rename(aside)
        made.rename(place)
        _sync(self.folder)
        for old in (aside, *self._all()[: -self._keep]):
            self._delete(old)
        return place

    @property
    def latest(self) -> Path | None:
        """The folder of the newest checkpoint; None where there is none."""
        found = self._all()
        return found[-1] if found else None

    def load(self, place: Path, ranks: Ranks = ALONE) -> tuple[Progress, dict[str, torch.Tensor], dict[str, Any]]:
        """What `save` was given, the state in this rank's parts. Raises `BadCheckpoint` where a file is missing or
        broken, and `InvalidInput` for an adapter's where a model's is wanted, or the other way round, and for one of a
        later release."""
        from safetensors.torch import load_file

        other = ADAPTER_FILE if self.adapter is None else WEIGHTS_FILE
        if (place / other).exists():
            said = "an adapter, and lora is not set" if self.adapter is None else "a whole model, and lora is set"
            raise InvalidInput(
                f"{place} holds {said}; go on with the configuration it was made with, or in another run"
            )
        try:
            written, instead = (place / "progress.json").read_bytes(), "begin another run with its folder as the model"
            check_format(place / "progress.json", written, FORMAT_VERSION, instead)
            progress = msgspec.json.decode(written, type=Progress)
            progress.format_version = FORMAT_VERSION  # as it is saved from here on
            weights = load_file(place / self._weights_file)
            return progress, weights, read_state(place, ranks)
        except InvalidInput:  # of a later release: nothing is broken
            raise
        except (OSError, ValueError, RuntimeError, KeyError, pickle.UnpicklingError, msgspec.DecodeError) as error:
            raise BadCheckpoint(f"{place} cannot be read: {error}; delete it to go on from the one before") from error

    def check_model(self, place: Path, weights: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size]) -> None:
        """Raises `InvalidInput` where a checkpoint's weights have not the names and shapes of the model's."""
        for name in sorted(wanted.keys() | weights.keys()):
            theirs = list(weights[name].shape) if name in weights else "missing"
            ours = list(wanted[name]) if name in wanted else "missing"
            if theirs != ours:
                raise InvalidInput(
                    f"{place} is a checkpoint of another model than {self._model}: {name} is {theirs} there and {ours} "
                    f"in the model; name the model that the run began with, or another folder for this run"
                )

    @property
    def _weights_file(self) -> str:
        return WEIGHTS_FILE if self.adapter is None else ADAPTER_FILE

    def _beside(self, place: Path, ending: str) -> Path:
        """Where what is no checkpoint of that name yet, or any more, stands meanwhile."""
        return self.folder / f".{place.name}{ending}"

    def _delete(self, old: Path) -> None:
        """Deletes a checkpoint, or one that was moved aside: at no time is a part of one in its place."""
        if old.exists():
            gone = self._beside(old, GONE)
            old.rename(gone)
            shutil.rmtree(gone)

    def _all(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit())


def files_folder(model: Path) -> Path:
    """The folder with a model's configuration and tokenizer: a hub name's is in the hub's cache, into which what is
    missing is fetched where the hub answers. Raises `InvalidInput` where there is no configuration."""
    folder = local_model_folder(model)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(COPIED_FILES)))
    except (OSError, ValueError) as error:
        found = try_to_load_from_cache(str(model), "config.json")
        if not isinstance(found, str):
            raise InvalidInput(
                f"model {model}: its configuration is not in the hub's cache, and cannot be fetched: {error}; give the "
                "folder of a checkpoint"
            ) from error
        log.warning("checkpoints have no more files of %s than the hub's cache has: %s", model, error)
        return Path(found).parent


class LeaseFile:
    """`leases.json`: the leases that a run holds, and the id of the fetch that is under way, so that a resumed run can
    give back what was handed out to the process before."""

    def __init__(self, run: Path) -> None:
        self._file = run / "leases.json"

    def write(self, leases: list[str], request: str = "") -> None:
        """Replaces the file atomically."""
        made = self._file.with_suffix(".part")
        made.write_text(json.dumps({"leases": leases, "request": request}))
        made.rename(self._file)

    def read(self) -> tuple[list[str], str]:
        """The leases of the process before, and the id of its last fetch where no answer came; neither where the file
        is missing or broken."""
        try:
            found = json.loads(self._file.read_text())
            return [str(lease) for lease in found["leases"]], str(found["request"])
        except (OSError, ValueError, KeyError, TypeError):
            return [], ""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
