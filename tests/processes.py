"""Processes that tests kill or stop, found by what they call themselves."""

from collections.abc import Collection
from contextlib import suppress

import psutil


def schedulers(*, except_for: Collection[int]) -> list[psutil.Process]:
    """SGLang's, of engines that this process or its children opened; without some, by their numbers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid not in except_for and "sglang::scheduler" in " ".join(process.cmdline()):
                found.append(process)
    return found
