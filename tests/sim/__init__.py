"""Deterministic simulation of whole daemons; README.md says how to use it and how to replay a seed."""
