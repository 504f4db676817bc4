import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from potluck.client.base.availability_plan import AvailabilityPlan

HOUR, DAY = 3600.0, 86400.0
MIDNIGHT = 20_000 * DAY


@pytest.mark.parametrize(
    ("hours", "begin", "end", "share"),
    [
        (["20:00-06:00"], 5, 7, 0.5),
        (["20:00-06:00"], 19, 21, 0.5),
        (["20:00-06:00"], 22, 29, 1.0),
        (["20:00-06:00"], 6, 20, 0.0),
        (["20:00-06:00"], 0, 240, 10 / 24),
        (["08:00-12:00", "11:00-14:00"], 7, 15, 6 / 8),
        (["08:30-09:00"], 8, 9, 0.5),
        (["00:00-24:00"], 3, 99, 1.0),
        (["20:00-06:00"], 21, 21, 1.0),
        (["20:00-06:00"], 12, 12, 0.0),
    ],
)
def test_availability_forecast_is_the_share_of_the_span_within_available_hours(
    hours: list[str], begin: float, end: float, share: float
) -> None:
    plan = AvailabilityPlan(hours=tuple(hours))
    found = plan.forecast("a", MIDNIGHT + begin * HOUR, MIDNIGHT + end * HOUR)
    assert found == pytest.approx(share)


def test_availability_forecast_multiplies_hours_by_the_chance_of_the_client() -> None:
    plan = AvailabilityPlan(chance=0.5, hours=("00:00-12:00",), clients={"b": 0.2})
    span = (MIDNIGHT + 6 * HOUR, MIDNIGHT + 18 * HOUR)
    assert plan.forecast("a", *span) == pytest.approx(0.25)
    assert plan.forecast("b", *span) == pytest.approx(0.1)
    assert AvailabilityPlan().forecast("a", *span) == 1.0
    assert AvailabilityPlan(chance=0.3).forecast("a", *span) == 0.3


@given(
    st.lists(st.tuples(st.integers(0, 1439), st.integers(0, 1439)), max_size=4),
    st.integers(0, 3000),
    st.integers(1, 4000),
)
def test_availability_forecast_equals_the_share_counted_minute_by_minute(
    spans: list[tuple[int, int]], begin: int, length: int
) -> None:
    """The reference counts the available minutes in a table of the day."""
    day = np.zeros(1440, dtype=bool)
    for first, last in spans:
        if first < last:
            day[first:last] = True
        else:
            day[first:] = day[:last] = True
    hours = tuple(f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in spans)
    share = day[np.arange(begin, begin + length) % 1440].mean() if spans else 1.0
    found = AvailabilityPlan(hours=hours).forecast(
        "a", MIDNIGHT + 60.0 * begin, MIDNIGHT + 60.0 * (begin + length)
    )
    assert found == pytest.approx(share)


@given(st.floats(0, 1e300), st.floats(0, 1e300))
def test_availability_forecast_of_any_span_is_a_probability(begin: float, more: float) -> None:
    found = AvailabilityPlan(hours=("20:00-06:00",)).forecast("a", begin, begin + more)
    assert 0 <= found <= 1


@pytest.mark.parametrize("text", ["8-9", "24:30-25:00", "08:00", "08:00-24:30", "24:00-08:00", ""])
def test_availability_plan_with_invalid_hours_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="two times of day"):
        AvailabilityPlan(hours=(text,))


@pytest.mark.parametrize("values", [{"chance": 1.1}, {"clients": {"a": -0.1}}, {"odds": 1}])
def test_availability_plan_with_invalid_chances_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AvailabilityPlan.model_validate(values)
