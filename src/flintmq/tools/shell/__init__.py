"""The commands for people: ``flintmq pub``, ``sub``, ``tail``, ``top`` and others, one family with the same options."""
