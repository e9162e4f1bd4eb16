"""What NSQ does, rule by rule; README.md says how to run it against another nsqd."""
