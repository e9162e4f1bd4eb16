"""An nsqd as a node of a cluster; one that belongs to none imports nothing of it."""
