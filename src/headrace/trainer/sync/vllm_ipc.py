"""vLLM's own weight transfer by CUDA IPC: `--weight-transfer-config '{"backend": "ipc"}'`, in the form of vLLM 0.32.

An update is begun, told once where every tensor lies, and finished. vLLM takes torch's own handles, which over HTTP are
a pickle, and only where `VLLM_ALLOW_INSECURE_SERIALIZATION=1` says that it may. It does not say which GPU it is on, and
a begun update that fails cannot be undone: it has to be restarted. So this is for those who ask for it
(`sync.via: cuda_ipc`).
"""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.cuda_ipc import GpuBlock
    from headrace.trainer.sync.http import ServerHttp

FLAGS = """--weight-transfer-config '{"backend": "ipc"}' and VLLM_ALLOW_INSECURE_SERIALIZATION=1"""
#: Tensors are told one by one, not as a buffer without gaps.
INIT = {"init_info": {"packed": False}}


def send(http: ServerHttp, block: GpuBlock) -> None:
    """Has a vLLM load a block's tensors; returns when it has read them all. Raises `ServerFailed`, after which it
    loads nothing more."""
    http.post("/start_weight_update")
    http.post("/update_weights", {"update_info": update_info(block)})
    http.post("/finish_weight_update")


def update_info(block: GpuBlock) -> dict[str, Any]:
    """What `/update_weights` is told of a block: names, dtypes and shapes, and for each tensor its handle by the UUID
    of the GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    tensors = block.tensors()
    handles = [{block.gpu_uuid: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
