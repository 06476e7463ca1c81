"""The base class of everything a user can cause and mend.

The command line prints a `UserError` as one message without a traceback and exits with code 2. Whatever is not a
`UserError` is a defect of the program and keeps its traceback.
"""


class UserError(Exception):
    """Something outside the program is wrong; the message says what, with the values, and how to mend it."""
