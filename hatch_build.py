"""What the metadata says about where the project is: links of the README that work on an index, and the project's URLs.

Where it is published is not written down here: whoever builds a release says so, and without that the README is taken
as it is::

    FLINTMQ_PROJECT_URL=https://example.org/flintmq python -m build

Rules of this file: it runs while a distribution is built, with hatchling and the standard library alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FLINTMQ_PROJECT_URL"
_LINK = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata; hatchling calls it."""
        url = os.environ.get(VARIABLE, "").rstrip("/")
        if url and not re.fullmatch(r"https://[^\s/]+(/\S*)?", url):
            raise ValueError(f"{VARIABLE}={url}: it must be the https:// address of the project")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        tag = f"v{metadata['version']}"
        if url:
            text = _LINK.sub(lambda found: f"]({url}/blob/{tag}/{found[1]})", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = (
            {}
            if not url
            else {
                "Homepage": url,
                "Source": url,
                "Documentation": f"{url}/tree/{tag}/docs",
                "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        )
