"""The one exception a user is meant to see."""


class UserError(Exception):
    """Something the user supplied is wrong: the message is one line that names it and says what to do.

    The command line prints it without a traceback and exits with code 2. It lives outside every subpackage so that
    modules that need no tensor can raise it without importing torch.
    """
