"""The one exception for what a user can mend. The command line prints its sentence alone and exits with code 2."""

import re


class UserError(Exception):
    """One sentence that names the thing, says what is wrong with it, and what to do."""


def out_of_memory(error: BaseException) -> str | None:
    """Return the beginning of a sentence if this error says that memory ran out: the GPU's, or the host's.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8192 bytes."))
    'out of memory (8192 bytes more were wanted)'
    """
    text = str(error)
    known = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    if not isinstance(error, MemoryError) and not any(words in text for words in known):
        return None
    wanted = re.search(r"allocate ([\d.]+ ?\w+)", text)
    return f"out of memory ({wanted[1]} more were wanted)" if wanted else "out of memory"
