"""The data source `durable` as Spark finds it by itself: `spark.read.format("durable")` in any session.

Spark imports each top-level package whose name begins with `pyspark_`, and registers its `DefaultSource`. A wheel
installs this one there; a checkout and an editable install have it in durable/pipeline/plugin, for PYTHONPATH.
"""

from contextlib import suppress

# One package that fails to be imported makes Spark pass over the data sources of all others.
with suppress(ImportError):  # durable without its extra for Spark
    from durable.pipeline.source import EnvelopeSource as DefaultSource

__all__ = ["DefaultSource"]
