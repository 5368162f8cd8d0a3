"""Every test runs offline, with one torch thread and a clean random state."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)
