"""Runs an environment's file as `python FILE ARGS` would: in atroposlib's own Python.

atroposlib 0.4.0 was written for transformers 4, whose chat templates give a list of ids where nothing else is said.
"""

import runpy
import sys

from transformers import PreTrainedTokenizerBase

templated = PreTrainedTokenizerBase.apply_chat_template


def listed(self, *args, **kwargs):
    kwargs.setdefault("return_dict", False)
    return templated(self, *args, **kwargs)


PreTrainedTokenizerBase.apply_chat_template = listed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
