"""What every test shares: hypothesis without a deadline, because the machine may be busy with something else; and
compiled modules for the thousands of processes that tests start, where the environment says that none are written.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis

hypothesis.settings.register_profile("flintmq", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flintmq")

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
