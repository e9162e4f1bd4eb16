"""Tables of Delta Lake and Apache Iceberg, written with one transaction per batch, without a JVM.

Source: docs/decisions/0034.
"""
