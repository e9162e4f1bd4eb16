"""What an nsqd does as a node of a cluster; nothing of it is imported by one that belongs to none."""
