"""Other people's clients against our daemons."""
