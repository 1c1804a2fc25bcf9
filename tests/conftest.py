"""What all tests share: one nursery of engine processes, which imports torch once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollplex.runtime.nursery import kept


@pytest.fixture(scope="session", autouse=True)
def one_nursery() -> Iterator[None]:
    with kept():
        yield
