"""The errors that a user is meant to read."""


class GspoError(Exception):
    """A run cannot go on; the message says what was found and what to do. Exit status 1."""


class LostProcessError(GspoError):
    """Another process of the job ended, or did not answer in time. Why it did is its own to say."""


class BadInputError(GspoError):
    """Input that cannot work: a setting, a file, a model, a reward function. Exit status 2.

    The message is one line: the setting or `file:line`, what was found, what is allowed, what to do.
    """
