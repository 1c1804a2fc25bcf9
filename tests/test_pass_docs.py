"""What a pass says of itself, which is what docs/passes.md is made of."""

from __future__ import annotations

import re
import sys

import pytest

from rollplex.ir.job import Job
from rollplex.passes.base import Pass
from rollplex.passes.pipeline import default_pipeline


@pytest.mark.parametrize("p", default_pipeline(), ids=lambda p: p.name)
def test_a_pass_tells_its_reader_enough(p: Pass) -> None:
    """A sentence on the class, more than a sentence on its file, and what its fact is."""
    assert re.match(r"[A-Z].{30,}\.$", (p.__doc__ or "").partition("\n")[0])
    assert len((sys.modules[type(p).__module__].__doc__ or "").splitlines()) > 3
    assert (p.makes.__doc__ or "").partition("\n")[0].endswith(".")
    assert getattr(p.makes, "made_by", p.name) == p.name


@pytest.mark.parametrize("p", default_pipeline(), ids=lambda p: p.name)
def test_the_job_keys_it_names_are_keys(p: Pass) -> None:
    """`section.key` after "Job keys:" stands in the job's schema."""
    for key in re.findall(r"`([\w.]+)`", (p.__doc__ or "").partition("Job keys:")[2]):
        section, _, name = key.partition(".")
        field = Job.model_fields[section]
        assert not name or name in field.annotation.model_fields, key  # type: ignore[union-attr]
