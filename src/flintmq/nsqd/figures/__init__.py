"""Figures of nsqd: collected in :mod:`flintmq.nsqd.figures.collection`, written for /stats, Prometheus and statsd."""
