"""The client on asyncio: connections, producer and consumer around :mod:`flintmq.client.core`."""
