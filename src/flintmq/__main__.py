"""``python -m flintmq`` is the command ``flintmq``."""

from __future__ import annotations

import sys

from flintmq.cli import main

sys.exit(main())
