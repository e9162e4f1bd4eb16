"""Deterministic simulation of whole daemons: see README.md here."""
