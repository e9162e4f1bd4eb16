"""What every test shares: hypothesis without a deadline, because the machine may be busy with something else."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("flintmq", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flintmq")
