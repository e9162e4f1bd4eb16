"""The pages of nsqadmin in a real browser; a package, so that its fixtures, and Playwright's loop, end with its last
test.
"""
