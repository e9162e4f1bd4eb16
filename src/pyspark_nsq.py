"""Makes ``spark.read.format("nsq")`` work without registration.

Spark imports every top-level module whose name begins with ``pyspark_`` and registers its ``DefaultSource``. One such
module that fails to import hides the data sources of all others, so this one imports nothing until it is asked.

Source: docs/decisions/0006.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pyspark.version import __version__

        from flintmq.spark.session_settings import refused_source, unfit_pyspark

        if why := unfit_pyspark(__version__):
            return refused_source(why)
        from flintmq.spark.source import NsqDataSource
    except ImportError as error:  # Spark asks with hasattr(), which passes on only an AttributeError as "no"
        raise AttributeError(f"{__name__}.{name} is not available: {error}") from error
    return NsqDataSource
