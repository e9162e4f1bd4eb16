"""The deterministic engine: topics, partitions, channels. No sockets, no clock; time comes in as arguments."""
