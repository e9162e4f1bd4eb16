"""The Spark source and sink, with and without a JVM."""
