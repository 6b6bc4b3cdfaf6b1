import pytest

from data.chat.conversation import effort_budget


def test_efforts_by_name_and_number():
    assert [effort_budget(value) for value in ("low", "high", "max", 1, 100)] == [50, 75, 100, 1, 100]
    for value in (True, False, 0, 101, "50abc", "50", 50.0, None, "", "Low", [50]):
        with pytest.raises(ValueError, match="must be one of low, high, max or a whole number from 1 to 100"):
            effort_budget(value)
