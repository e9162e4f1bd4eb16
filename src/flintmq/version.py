"""The version of this release; ``pyproject.toml`` and CHANGELOG.md name the same."""

__version__ = "0.1.0"
