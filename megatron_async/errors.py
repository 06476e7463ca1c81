"""The base class of everything a user can cause and mend.

The command line prints a `UserError` as one message without a traceback and exits with code 2. Whatever is not a
`UserError` is a defect of the program and keeps its traceback.

A part of a run also leaves the message where its launcher said (`ERROR_FILE`), since torchrun ends with code 1 whatever
its ranks end with: the run then ends with that message, instead of being tried again.
"""

import os
from pathlib import Path

EXIT_USER_ERROR = 2
EXIT_STOPPED = 130
"""Exit code after Ctrl-C, as shells use it."""

ERROR_FILE = "MEGATRON_ASYNC_ERROR_FILE"
"""Environment variable of a part's processes: the file that takes what one of them says the user has to mend."""


class UserError(Exception):
    """Something outside the program is wrong; the message says what, with the values, and how to mend it."""


class MissingHere(UserError):
    """A package, an interpreter or a variable is missing on this machine; where the job runs it may be there."""


class PartnerGone(UserError):
    """Another part of the run ended or fell silent, which ended this one: nothing that this one's user has to mend, so
    that both may be started again."""


def leave_message(error: Exception) -> None:
    """Tell the launcher, if there is one, what the user has to mend. The first of several ranks is heard."""
    path = os.environ.get(ERROR_FILE)
    if path is None or not isinstance(error, UserError) or isinstance(error, PartnerGone):
        return
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(str(error))
    except OSError:
        return  # another rank was faster, or the disk is full: the log has it too
