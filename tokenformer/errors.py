"""The one exception for what a user can mend. The command line prints its sentence alone and leaves with code 2."""


class UserError(Exception):
    """One sentence that names the thing, says what is wrong with it, and what to do."""
