"""The HTTP API of nsqd: a file for each kind of request, put together in :mod:`flintmq.nsqd.api.routes`."""
