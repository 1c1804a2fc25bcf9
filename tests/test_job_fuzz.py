"""No text, value or override makes reading a job end in anything but a job or a JobError."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st
from job_texts import GOOD, TINY_CONFIG

from rollplex.ir.errors import JobError
from rollplex.ir.job import Job, load_job
from rollplex.ir.models import spec_from_config

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def key_paths(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of nested dicts, as a path."""
    if not isinstance(data, dict):
        return []
    return [p for key, value in data.items() for p in ((*path, key), *key_paths(value, (*path, key)))]


PATHS = key_paths(yaml.safe_load(GOOD))


def read(text: str | bytes, *overrides: str) -> None:
    """Read a job from a text; anything but a JobError passes through and fails the test."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "job.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(JobError):
            job = load_job(file, overrides)
            assert Job.model_validate_json(job.model_dump_json()) == job


@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=3))
def test_any_value_under_any_key(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    data = yaml.safe_load(GOOD)
    for (*sections, key), value in changes:
        section = data
        for part in sections:
            section = section[part] if isinstance(section, dict) and isinstance(section.get(part), dict) else {}
        section[key] = value
    read(yaml.safe_dump(data, allow_unicode=True))


@given(st.sampled_from(PATHS), st.text(max_size=12))
def test_any_override(path: tuple[str, ...], value: str) -> None:
    read(GOOD, f"{'.'.join(path)}={value}", value)


@given(st.integers(0, len(GOOD)), st.integers(0, 40), st.text(max_size=8))
def test_any_edit_of_the_text(start: int, length: int, text: str) -> None:
    read(GOOD[:start] + text + GOOD[start + length :])


@given(st.binary(max_size=64) | st.text(max_size=64))
def test_any_bytes(text: str | bytes) -> None:
    read(text)


@given(st.dictionaries(st.sampled_from([*TINY_CONFIG, "head_dim", "text_config", "vision_config"]), VALUES))
def test_any_model_config(changes: dict[str, Any]) -> None:
    with contextlib.suppress(JobError):
        spec = spec_from_config({**TINY_CONFIG, **changes}, "any")
        assert spec.parameters >= 1
        assert 1 in spec.legal_tp()
