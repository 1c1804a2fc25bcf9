"""How many files a process may have open: each chunk of shared memory is one, and pages cross as descriptors."""

from __future__ import annotations

import resource

WANTED = 1 << 16
"""Shells give 1,024 by default, of a hard limit that is far higher: 16 GiB in chunks, twice while they cross."""


def raise_limit() -> None:
    """As many as the hard limit lets this process and its children have, up to what any run needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
