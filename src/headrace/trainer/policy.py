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
from headrace.trainer.logits import log_probs_of
from headrace.trainer.lora import Adapter
from headrace.trainer.optimizer import narrow


class Policy:
    """A causal LM of transformers that computes log-probs of packed sequences. Raises `InvalidInput` where it cannot be
    loaded, or caps its logits."""

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
        self.adapter = None if lora is None else Adapter(self.model, lora, folder, seed=seed)
        self.model.to(self.device)
        self.decoder = Decoder(self.model.get_decoder(), self.dtype, self.device)
        if getattr(self.model.config, "final_logit_softcapping", None):
            raise InvalidInput(f"{folder} caps its logits (final_logit_softcapping), which the trainer does not")

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What a checkpoint holds: the parameters by their names there, tied ones once; with LoRA the adapter's, by
        peft's names."""
        return dict(self.model.named_parameters()) if self.adapter is None else self.adapter.named_parameters()

    def weights(self) -> dict[str, Tensor]:
        """What a server loads: the values of `named_parameters`. They share the model's memory."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    def narrow(self) -> dict[nn.Parameter, Tensor]:
        """Rounds the weights to the dtype of the computation; returns what they were, of those that are trained."""
        return narrow(self.model.parameters(), self.dtype)

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the weights of a checkpoint of this policy into the model."""
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
            )

    def raw_log_probs(self, ids: list[int]) -> list[float]:
        """The log-probs of each token but the first, at temperature 1, as a rollout server with the same weights
        computes them."""
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        with torch.no_grad(), self.decoder.computing():
            states = self.decoder.states(tokens, positions, cuts=[0, len(ids)])[:-1]
            every = torch.log_softmax(self.model.get_output_embeddings()(states).float(), -1)
        found: list[float] = every.gather(-1, tokens[1:, None])[:, 0].tolist()
        return found


class Critic(nn.Module):  # type: ignore[misc] # torch is not checked
    """Predicts, before each target, the reward that is still to come."""

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        super().__init__()
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.trunk = _load(folder, causal=False)
        self.head = nn.Linear(self.trunk.config.hidden_size, 1)
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

    check_model(folder)
    disable_progress_bar()
    kind = AutoModelForCausalLM if causal else AutoModel
    try:
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.register())
    except (OSError, ValueError) as error:
        raise model_load_error(folder, error) from error
    return model.train()  # without dropout: `attention` refuses a model with it


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
