"""The daemon nsqlookupd: tells clients which nsqd has which topic."""
