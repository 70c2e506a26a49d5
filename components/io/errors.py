"""The one error that a user is meant to read."""


class UserError(Exception):
    """Something the user can mend. The message is one sentence: what is wrong, where, and what to do.

    The command line prints the message alone (no traceback) and exits with status 2.
    """
