"""The client, whatever moves its bytes: no event loop, no thread, no socket; time comes in."""
