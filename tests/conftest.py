"""Settings for every test."""

import os

from hypothesis import settings

# The same examples on every run; set HYPOTHESIS_PROFILE=explore to look for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
