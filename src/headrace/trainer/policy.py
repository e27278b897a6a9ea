"""The models that are trained: a causal LM over packed sequences, and a critic of the same architecture; both from a
checkpoint's folder or a name on Hugging Face's hub.

`dtype` is that of the computation. Weights are float32 when they are loaded; `narrow` rounds them to the dtype of the
computation, which then needs no casts. A token's log-prob is that of the logits divided by the temperature at which it
was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.data.errors import InvalidInput
from headrace.files import HUB_NAME
from headrace.trainer import attention
from headrace.trainer.backends.tensors import Packed
from headrace.trainer.config import LoraConfig
from headrace.trainer.decoder import Decoder
from headrace.trainer.logits import log_probs_of, logits_of
from headrace.trainer.lora import Adapter
from headrace.trainer.model_check import check_layers, check_packing, logit_factor
from headrace.trainer.optimizer import narrow
from headrace.trainer.weight_names import WeightNames


class Policy:
    """A causal LM of transformers that computes log-probs of packed sequences. Raises `InvalidInput` where it cannot be
    loaded, or not be computed exactly: where its layers carry one packed sequence into the next, or its logits are more
    than its head's output times a factor."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        lora: LoraConfig | None = None,
        seed: int = 0,
    ) -> None:
        """With `lora`, only adapters are trained, whose first values depend on `seed`."""
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        self.model = _load(folder, causal=True)
        if getattr(self.model.config.get_text_config(), "final_logit_softcapping", None):
            raise InvalidInput(f"{folder} caps its logits (final_logit_softcapping), which the trainer does not")
        self._names = WeightNames(self.model)
        self.adapter = None if lora is None else Adapter(self.model, lora, folder, seed=seed, names=self._names)
        self.model.to(self.device)
        check_packing(self.model, folder)
        self._logit_factor = logit_factor(self.model, folder)
        self.decoder = Decoder(self.model.get_decoder(), self.dtype, self.device)

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What a checkpoint keeps of a run, by its names in memory: the model's parameters, tied ones once; with LoRA
        the adapter's, by peft's names, which are those of its checkpoint too."""
        return dict(self.model.named_parameters()) if self.adapter is None else self.adapter.named_parameters()

    def weights(self) -> dict[str, Tensor]:
        """The values of `named_parameters`. They share the model's memory."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    def buffers(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides parameters and is never trained, by its names in memory."""
        if self.adapter is not None:
            return {}
        return {name: self.model.get_buffer(name) for name in self._names.buffers}

    def in_checkpoint(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights that have `named_parameters`' names by those of the checkpoint, by which servers load them. They are
        taken out of `weights`."""
        return weights if self.adapter is not None else self._names.in_checkpoint(weights)

    def in_memory(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's weights by `named_parameters`' names; what the model does not have, by its name there."""
        return weights if self.adapter is not None else self._names.in_memory(weights)

    def narrow(self) -> dict[nn.Parameter, Tensor]:
        """Rounds the weights to the dtype of the computation; returns what they were, of those that are trained."""
        return narrow(self.model.parameters(), self.dtype)

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies weights that have `named_parameters`' names into the model."""
        if self.adapter is not None:
            self.adapter.restore(weights)
            return
        with torch.no_grad():
            for name, mine in self.named_parameters().items():
                mine.copy_(weights[name])

    def log_probs(self, packed: Packed, *, entropy_learns: bool = False) -> tuple[Tensor, Tensor]:
        """For every target its log-prob, and the entropy of the distribution it was sampled from; the entropy has a
        gradient where `entropy_learns`."""
        log_probs, entropy, _ = self.candidate_log_probs(packed, None, entropy_learns=entropy_learns)
        return log_probs, entropy

    def candidate_log_probs(
        self, packed: Packed, candidates: Tensor | None, *, entropy_learns: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and the log-probs, at temperature 1, of these candidates [M, K] for each target; -inf for an id
        that is no token of the model."""
        states = self.decoder.states(packed.ids, packed.positions, cuts=packed.cuts, tree=packed.tree)[packed.states]
        with self.decoder.computing():
            return log_probs_of(
                *(self.model.get_output_embeddings(), states, packed.target_ids, packed.temperatures, candidates),
                entropy_learns=entropy_learns,
                factor=self._logit_factor,
            )

    def raw_log_probs(self, ids: list[int]) -> list[float]:
        """The log-probs of each token but the first, at temperature 1, as a rollout server with the same weights
        computes them."""
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        with torch.no_grad(), self.decoder.computing():
            states = self.decoder.states(tokens, positions, cuts=[0, len(ids)])[:-1]
            every = torch.log_softmax(logits_of(self.model.get_output_embeddings(), states, self._logit_factor), -1)
        found: list[float] = every.gather(-1, tokens[1:, None])[:, 0].tolist()
        return found


class Critic(nn.Module):  # type: ignore[misc] # torch is not checked
    """Predicts, before each target, the reward that is still to come."""

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        super().__init__()
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.trunk = _load(folder, causal=False)
        self.head = nn.Linear(self.trunk.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # every value is 0 at first
        nn.init.zeros_(self.head.bias)
        self.to(self.device)
        self.decoder = Decoder(self.trunk, self.dtype, self.device)

    def narrow(self) -> dict[nn.Parameter, Tensor]:
        """Rounds the weights to the dtype of the computation, the head's not; returns what they were."""
        return narrow(self.trunk.parameters(), self.dtype)

    def forward(self, packed: Packed) -> Tensor:
        """One value for each target."""
        states = self.decoder.states(packed.ids, packed.positions, cuts=packed.cuts, tree=packed.tree)[packed.states]
        values: Tensor = self.head(states.float())[:, 0]
        return values


def _load(folder: Path, *, causal: bool) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = load_config(folder)
    disable_progress_bar()
    kind = AutoModelForCausalLM if causal else AutoModel
    try:
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.register())
    except (OSError, ValueError) as error:
        raise model_load_error(folder, error) from error
    if causal and type(model.config) is not type(config):
        raise InvalidInput(
            f"model {folder} is a {config.model_type}, of which {type(model).__name__} is the text part: its "
            "checkpoints would not be whole. Save the text part as a model of its own, and train and serve that"
        )
    return model.eval()  # nothing in it is random: servers sample without dropout, so log-probs must be without it too


def load_config(model: Path) -> Any:
    """The configuration of a model. Raises `InvalidInput` where it cannot be loaded, or names layers that packed
    sequences cannot go through."""
    from transformers import AutoConfig

    check_model(model)
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise model_load_error(model, error) from error
    check_layers(config, model)
    return config


MODEL_HINT = "give the folder of a checkpoint (config.json, *.safetensors), or a hub name such as Qwen/Qwen3-0.6B"


def check_model(model: Path) -> None:
    """Raises `InvalidInput` where a model is neither a folder with a checkpoint nor what could be a hub name."""
    if (model / "config.json").is_file():
        return
    if model.is_dir():
        raise InvalidInput(f"model {model}: the folder {model.absolute()} has no config.json; {MODEL_HINT}")
    if model.exists():
        raise InvalidInput(f"model {model} is a file; {MODEL_HINT}")
    if not HUB_NAME.fullmatch(str(model)):
        raise InvalidInput(f"model {model}: there is no folder {model.absolute()}; {MODEL_HINT}")


def model_load_error(model: Path, error: Exception) -> InvalidInput:
    """The error for a model that `check_model` let pass and transformers could not load."""
    if model.is_dir():
        return InvalidInput(f"model {model} cannot be loaded: {error}")
    why = str(error).strip().splitlines()
    return InvalidInput(
        f"model {model}: there is no folder {model.absolute()}, and as a hub name it cannot be loaded: "
        f"{why[0] if why else type(error).__name__}; {MODEL_HINT}"
    )
