"""The daemon nsqd."""
