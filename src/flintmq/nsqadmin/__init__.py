"""nsqadmin: web pages and a JSON API over the nsqd and nsqlookupd of a deployment.

Layers inside, upper to lower: ``server``, ``app``, ``api`` and ``exports``, ``guard``, ``admin``, ``render`` and
``pages``, ``actions``, ``gather``, ``snapshots``, ``upstream``, ``daemons``, ``views``; beside them ``access``,
``audit``, ``notify``, ``graphite``, ``official``.

Rules of this package: the daemons are asked over HTTP and nothing of theirs is imported; whatever they answer may be
late, wrong or of another kind, and then one row says so and the rest stays; everything that is kept has a bound.
Starlette, uvicorn and Jinja2 are imported here and nowhere else.
"""
