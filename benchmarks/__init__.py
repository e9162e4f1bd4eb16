"""Benchmarks: speed and memory of the daemons, the client, the log and Spark, one module per published table.

``python -m benchmarks`` runs all of them, see ``__main__.py``. Nothing here is part of the package.
"""
