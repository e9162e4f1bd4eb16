"""``python -m flintmq.spool``: see :mod:`flintmq.spool.process`; with the word ``look``, :mod:`flintmq.spool.look`."""

from __future__ import annotations

import sys

from flintmq.spool import look, process

if __name__ == "__main__":
    sys.exit(look.main() if sys.argv[1:] == ["look"] else process.main())
