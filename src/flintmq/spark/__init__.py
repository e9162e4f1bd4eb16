"""Spark reads and writes topics: ``format("nsq")``, and a session that starts anywhere.

::

    from flintmq.spark import session

    spark = session("flights")
    spark.read.format("nsq").option("nsqd", "127.0.0.1:4150").option("topic", "flights").load().show()

Guarantees, options and the way to a cluster: docs/spark.md. Importing this package imports no pyspark, so that
:func:`session` can say what is missing.
"""

from __future__ import annotations

from flintmq.spark.errors import DataLost, SetupError
from flintmq.spark.session import activate, session

__all__ = ["DataLost", "SetupError", "activate", "session"]
