"""Coordination without IO: who serves what. Time comes in as ``now_ns``."""
