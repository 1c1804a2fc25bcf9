"""What every section of a job is: an immutable set of keys; and the kinds of numbers they hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Count = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeCount = Annotated[int, Field(ge=0, le=10**9)]
Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


MOST_PIECES = 4096
"""Finer optimizer chunks cost more in launches than their transfers take; as many sequences are never run at a time."""


def _auto_or_count(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_PIECES):
        return value
    raise ValueError(f"is {value!r}; expected auto or a whole number from 1 to {MOST_PIECES}")


AutoOrCount = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no silent conversion of numbers to flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"{str(value).lower()} does not belong here")
        return value
