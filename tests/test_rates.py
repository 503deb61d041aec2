"""Rates of steps, and what is made of them."""

import pytest

from localpaged.engine.rates import Rates


def test_prefill_is_measured_by_steps_that_are_nearly_all_prefill() -> None:
    rates = Rates()
    rates.observe(0, 500, 1.0)
    assert rates.prefill_tokens_s == 500
    rates.observe(400, 100, 9.0)
    rates.observe(0, 5, 9.0)
    assert rates.prefill_tokens_s == 500
    for _ in range(40):
        rates.observe(2, 100, 1.0)
    assert rates.prefill_tokens_s == pytest.approx(100, rel=0.01)


def test_steps_lie_between_those_that_were_measured() -> None:
    rates = Rates()
    rates.observe(1, 0, 0.010)
    rates.observe(8, 0, 0.024)
    assert rates.step_s(1) == pytest.approx(0.010)
    assert rates.step_s(4) == pytest.approx(0.016)
    assert rates.step_s(16) == pytest.approx(0.048)
    assert rates.step_s(8) == pytest.approx(0.024)
