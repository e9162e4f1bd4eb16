"""The web pages of nsqadmin: routes to templates, and what templates need.

Layers inside, upper to lower: ``routes``, ``acts``, ``shown``, ``assets | charts | told | wording``.

Rules of this package: a page is rendered on the server and can be read without JavaScript; its state stands in its
address; a page asks the rest of nsqadmin for its views, never a daemon itself.
"""

from flintmq.nsqadmin.pages.shown import prepare

__all__ = ["prepare"]
