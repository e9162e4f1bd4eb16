"""asyncio adapters: sockets, HTTP and logging around the sans-IO layers."""
