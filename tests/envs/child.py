"""An environment in a process of its own: `python -m tests.envs.child '{"api": …, "first": …, "most": …, …}'`.

Every other key is a field of BaseEnvConfig. Prints the number of its next item as it ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
from typing import Any

from tests.envs.kit import CountingEnv

from headrace.envs import BaseEnvConfig

#: Seconds after which it says where it is, and ends: less than a test may take.
HUNG_S = 900


async def main(api: str, first: int, most: int | None = None, **fields: Any) -> None:
    env = CountingEnv(BaseEnvConfig(rollout_server_url=api, group_size=2, use_wandb=False, **fields), most)
    env.next = first
    await env.env_manager()
    print(env.next)


faulthandler.dump_traceback_later(HUNG_S, exit=True)
asyncio.run(main(**json.loads(sys.argv[1])))
