"""How much a model is to think before it answers, in the words of its provider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.data.errors import InvalidInput

VALID_REASONING_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh"}
OFFICIAL = "api.openai.com"


@dataclass
class ReasoningConfig:
    """Reasoning as an environment asks for it. An effort or a number of tokens turns it on."""

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    #: About how many tokens an effort comes to, for providers that know only numbers.
    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            known = ", ".join(self.EFFORT_TO_MAX_TOKENS)
            raise InvalidInput(f"reasoning_effort is {self.effort!r}; it must be one of {known}")
        self.enabled = self.enabled or self.effort is not None or self.max_tokens is not None

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        return cls(
            enabled=getattr(env_config, "thinking_mode", False),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> dict[str, Any] | None:
        """What a request says of it; None where it is off. An effort goes before a number of tokens."""
        if not self.enabled:
            return None
        if is_official(base_url):
            return {"reasoning_effort": self.effort or "medium"}
        if self.effort is not None:
            most = self.EFFORT_TO_MAX_TOKENS[self.effort]
            return {
                "reasoning": {"enabled": True, **({"max_tokens": most} if use_max_tokens else {"effort": self.effort})}
            }
        if self.max_tokens is not None:
            return {"reasoning": {"enabled": True, "max_tokens": self.max_tokens}}
        return {"reasoning": {"enabled": True}}

    def injected(self, kwargs: dict[str, Any], base_url: str | None) -> dict[str, Any]:
        """A chat request that asks for it; OpenAI's own models take no other temperature then."""
        asked = self.build_extra_body(base_url)
        if asked is None:
            return kwargs
        kwargs = {**kwargs, "extra_body": {**(kwargs.get("extra_body") or {}), **asked}}
        if is_official(base_url):
            kwargs["temperature"] = 1.0
            if kwargs.get("max_tokens"):
                kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return kwargs


def is_official(base_url: str | None) -> bool:
    return bool(base_url) and OFFICIAL in str(base_url)
