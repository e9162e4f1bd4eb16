"""The utilities: programs around NSQ that are clients like any other."""
