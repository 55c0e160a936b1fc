"""Settings for every test."""

import logging
import os
import sys

import pytest
from hypothesis import settings

# The same examples on every run; set HYPOTHESIS_PROFILE=explore to look for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="module")
def _calm_pytorch():
    """PyTorch as small tests like it, where it is used at all.

    One thread, since threads that wait for one another cost more than they give here. And no log of
    every fake tensor of an export, which pytest would keep: it made tests forty times as slow.
    """
    logging.getLogger("torch.__trace").disabled = True
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)
