"""The NSQ protocols without IO: bytes in, events out; calls in, bytes out."""
