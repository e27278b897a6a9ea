"""The settings of a Trajectory API."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.dashboard import DASHBOARD_HELP, DashboardMode
from headrace.files import Key
from headrace.pool.config import MAX_CHANNEL_NAME


class TrajectoryApiSettings(BaseModel):
    """Settings of a Trajectory API; each field is also a flag of `headrace api`."""

    model_config = ConfigDict(allow_inf_nan=False)

    api_key: Key = Field(None, description="key that every call must present (or set HEADRACE_API_KEY)")
    serve_channel: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CHANNEL_NAME,
        description="a channel of the pool whose groups are served here too, and which these feed; it is kept",
    )
    heartbeat_s: float = Field(300, gt=0, description="an environment that did not call for so long has no weight")
    allow_origin: list[str] = Field(
        [], description="an origin whose web pages may call, as http://host:port; none unless it is named. Repeat it"
    )
    dashboard: DashboardMode = Field("edit", description=DASHBOARD_HELP)
    max_body_mb: float = Field(64, gt=0, description="largest body that is taken, unpacked")
    answer_s: float = Field(
        60, gt=0, description="most seconds that a trainer may take to read a batch before others may have it"
    )

    @field_validator("allow_origin")
    @classmethod
    def _origins(cls, given: list[str]) -> list[str]:
        for origin in given:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or f"{parts.scheme}://{parts.netloc}" != origin
            ):
                raise ValueError(f"{origin!r} is no origin; name each as http://host:port, with nothing behind it")
        return given
