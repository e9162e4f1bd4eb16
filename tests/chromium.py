"""The Chromium that the tests open pages in: its headless shell where there is one, at half the processor time."""

from __future__ import annotations

import shutil

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

CHROMIUM: str | None = next((found for name in _NAMES if (found := shutil.which(name))), None)
"""Its path; None without one."""
