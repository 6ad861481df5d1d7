"""The connection of this thread to the JVM of Spark."""

from __future__ import annotations

from pyspark import SparkContext


def forget_answers() -> None:
    """Let the next question have a connection of its own.

    Py4J keeps one on which an exception other than KeyboardInterrupt has ended the wait for an answer.
    """
    context = SparkContext._active_spark_context
    if context is not None and context._gateway is not None:
        connection = context._gateway._gateway_client.get_thread_connection()
        if connection is not None:
            connection.close()
